"""HardwareSpec, Layout and Quantity: what is refused and with which words, what is valid, what JSON shows."""

import json
from dataclasses import replace

import pytest

from coterie.planner.layout import Layout, layouts
from coterie.planner.quantity import least_trusted, sure
from coterie.spec import ModelSpec, SpecError
from coterie.spec.hardware import HardwareSpec

B200 = HardwareSpec(name="B200", kind="gpu", bf16_tops=2250, fp8_tops=4500, memory_gb=192, memory_gbps=8000)
DEMO = "src/coterie/data/demo"


def test_the_ridge_is_that_of_the_reference_paper() -> None:
    assert B200.ridge == pytest.approx(281.25)


def test_rates_fall_back_to_the_next_wider_unit() -> None:
    assert B200.rate(4) == B200.rate(8) == 4500e12
    assert replace(B200, fp8_tops=0).rate(8) == 2250e12


@pytest.mark.parametrize("field, value", [("memory_gb", 0), ("bf16_tops", -1), ("memory_gbps", float("nan"))])
def test_impossible_devices_are_refused_by_field(field: str, value: float) -> None:
    with pytest.raises(SpecError, match=field):
        replace(B200, **{field: value})


def test_the_seed_layout_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(SpecError, match=r"tp 8 x dp 4 = 32 ranks, not 8; valid .* 1 x 8, 2 x 4, 4 x 2, 8 x 1"):
        Layout(devices=8, tp=8, dp=4, ep=8)


def test_ep_must_divide_the_devices_and_slots_divide_over_ep() -> None:
    with pytest.raises(SpecError, match="ep 3 does not divide 8 devices; valid are 1, 2, 4, 8"):
        Layout(devices=8, tp=1, dp=8, ep=3)
    model = ModelSpec.from_hf(DEMO)
    experts = next(model.moe_layers())[1].num_experts
    with pytest.raises(SpecError, match="redundant"):
        Layout(devices=8, tp=1, dp=8, ep=8, redundant=1).check(model)
    Layout(devices=8, tp=1, dp=8, ep=8, redundant=-experts % 8).check(model)


def test_every_layout_that_is_offered_is_valid_and_uses_all_devices() -> None:
    model = ModelSpec.from_hf(DEMO)
    found = list(layouts(model, 8, Layout(devices=8, tp=1, dp=8, ep=8)))
    assert found and all(each.tp * each.dp == 8 and each.ep * each.moe_tp == 8 for each in found)
    assert len(set(found)) == len(found)


def test_a_sum_is_no_better_known_than_its_least_known_part() -> None:
    assert least_trusted(["exact", "assumed", "derived"]) == "assumed"
    assert least_trusted([]) == "exact"


def test_json_has_every_property_of_a_number() -> None:
    shown = sure(float("inf"), "s", "queue").spread(2).as_json()
    assert json.loads(json.dumps(shown)) == {
        "value": None, "p10": None, "p90": None, "unit": "s", "kind": "derived", "formula": "queue", "flags": [],
    }  # fmt: skip
