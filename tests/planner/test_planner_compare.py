"""Sides side by side: ratios are what the parts say, the batch in time is the largest, twins have the same size."""

from __future__ import annotations

import pytest

from coterie.planner.batch import largest_batch
from coterie.planner.compare import NAMES, Ask, Clock, Side, compare, ratio, scaled
from coterie.planner.devices import device
from coterie.planner.layout import Wish, choose
from coterie.planner.memory import Load
from coterie.planner.models import dense_twin, model
from coterie.planner.quantity import Quantity
from coterie.spec import SpecError

B200 = device("b200")


def side(name: str, devices: int = 32, wish: Wish | None = None, *, dense: bool = False) -> Side:
    found, spec = model(name)
    spec = dense_twin(spec) if dense else spec
    return Side(found, spec, B200, choose(spec, B200, devices, wish or Wish()))


def test_the_dense_twin_has_the_same_size_but_for_the_routers() -> None:
    spec = model("v3")[1]
    twin = dense_twin(spec)
    counts = spec.counts
    assert twin.counts.dense == counts.dense + counts.shared + counts.routed
    assert spec.num_parameters - twin.num_parameters == counts.other + 58 * 256  # routers and their biases
    assert twin.missing
    with pytest.raises(SpecError, match="its own dense twin"):
        dense_twin(model("llama-3.1-70b")[1])


def test_a_routed_model_needs_an_eighteenth_of_the_operations_of_its_twin() -> None:
    spec = model("v3")[1]
    assert dense_twin(spec).flops_per_token() / spec.flops_per_token() == pytest.approx(18.3, abs=0.1)
    assert dense_twin(spec).flops_per_token(4608) / spec.flops_per_token(4608) == pytest.approx(9.4, abs=0.1)


def test_columns_answer_the_same_names_and_ratios_follow() -> None:
    dense, routed = compare([side("v3", dense=True), side("v3")], Ask(price=3.6))
    assert tuple(dense.values) == tuple(routed.values) == NAMES
    assert not dense.reason and not routed.reason
    for column in (dense, routed):
        batch, time = column.values["requests in time"], column.values["time of a token"]
        rate, cost = column.values["tokens a second and device"], column.values["cost of a million tokens"]
        assert batch and time and rate and cost
        assert rate.value == pytest.approx(batch.value / time.value / 32)
        assert cost.value == pytest.approx(1e6 / rate.value / 1000)
        assert rate.p10 < rate.value < rate.p90 and rate.kind in ("calibrated", "extrapolated")
    cheaper = ratio(routed.values["cost of a million tokens"], dense.values["cost of a million tokens"])
    assert cheaper is not None and 0.1 < cheaper < 0.6


def test_the_batch_in_time_is_the_largest() -> None:
    clock = Clock(side("v3"), Ask())
    batch = largest_batch(clock.seconds, 0.05, 100_000)
    assert clock.seconds(batch) <= 0.05 < clock.seconds(batch + 1)
    assert largest_batch(clock.seconds, 0.05, 7) == 7
    assert largest_batch(clock.seconds, 1e-6, 7) == 0


def test_the_clock_is_the_fits_with_its_interval() -> None:
    known, other = (Clock(side("v3", 8, Wish(tp=8)), Ask(engine=engine)).time(32) for engine in ("sglang", None))
    assert known.kind == "calibrated" and 1 < known.p90 / known.value < other.p90 / other.value
    with pytest.raises(SpecError, match="no measurements of an engine 'mine'"):
        Clock(side("v3"), Ask(engine="mine"))


def test_bounds_of_a_rate_are_those_of_the_time_exchanged() -> None:
    time = Quantity(2.0, "s", "calibrated", "decode-step", 1.0, 4.0)
    rate = scaled(time, 8.0, "tokens/s", "token-rate", power=-1)
    assert (rate.p10, rate.value, rate.p90, rate.kind) == (2.0, 4.0, 8.0, "calibrated")
    cost = scaled(time, 8.0, "$", "cost")
    assert (cost.p10, cost.value, cost.p90) == (8.0, 16.0, 32.0)


def test_what_cannot_be_answered_says_why() -> None:
    small, late = compare([side("v3", 2), side("v3")], Ask(slo=1e-3))
    assert small.reason == "it does not fit" and small.values["requests in time"] is None
    assert "one request alone takes" in late.reason and late.values["requests that fit"]
    (asked,) = compare([side("v3")], Ask(load=Load(batch=64)))
    batch = asked.values["requests in time"]
    assert batch and batch.value == 64 and batch.kind == "exact"
    assert ratio(None, batch) is None and ratio(batch, None) is None
