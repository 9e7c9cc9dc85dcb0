"""A machine's measured shares: interpolation, the fit of constants, the hardware file there and back, bad files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coterie.planner.cost import Efficiency, decode_step, prefill_step
from coterie.planner.devices import device
from coterie.planner.layout import Layout
from coterie.planner.measured import (
    Constants,
    Measured,
    Share,
    by_rows,
    effect,
    fit_constants,
    interpolate,
    measured_seconds,
    resident_bytes,
    share_of,
)
from coterie.planner.measured_file import file_text, read_engine
from coterie.planner.ops import Op, Point, step_ops
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

V2_LITE = ModelSpec.from_hf(Path(__file__).parents[1] / "data" / "configs" / "deepseek-v2-lite.json")
ALONE = Layout(devices=1, tp=1, dp=1, ep=1, weights="bf16")
HW = HardwareSpec(name="two cores", kind="cpu", bf16_tops=0.1, int8_tops=0.4, memory_gb=16, memory_gbps=20,
                  disk_gbps=1.5, measured=True)  # fmt: skip
CONSTANTS = Constants(step=1e-4, dense_layer=2e-5, moe_layer=5e-5, stream=1e-5, value=1e-10, row=3e-7, logit=2e-10)
SHARES = tuple(
    Share(form, unit, size, rows, 0.5 + 0.1 * place)
    for form in ("bf16", "int8", "mla", "gqa")
    for unit in (64.0, 4096.0)
    for size in (1e6, 1e9)
    for place, rows in enumerate((1.0, 16.0, 256.0))
)
MACHINE = Measured(2, "avx512", ((1e7, 40.0), (1e9, 20.0)), SHARES, CONSTANTS)


def test_straight_lines_between_points_and_the_ends_beyond() -> None:
    points = [(0.0, 1.0), (2.0, 5.0), (3.0, 5.0)]
    assert [interpolate(points, x) for x in (-9, 0, 1, 2, 2.5, 9)] == [1, 1, 3, 5, 5, 5]


def test_a_product_takes_its_roofline_over_its_share() -> None:
    op = Op(name="x", kind="product", layer=0, times=1, nbytes=2e9, operations=1e6, rows=1, unit=512)
    seconds, bound = measured_seconds(op, HW, MACHINE, 1e9)
    assert (seconds, bound) == (pytest.approx(0.1 / 0.5), "memory")
    many = replace(op, operations=1e12, rows=256)
    assert measured_seconds(many, HW, MACHINE, 1e9) == (pytest.approx(10 / 0.7), "compute")
    assert measured_seconds(replace(many, form="int8"), HW, MACHINE, 1e9)[0] == pytest.approx(2.5 / 0.7)
    assert MACHINE.read_rate(1e8) == pytest.approx(40e9 * 0.5**0.5)
    assert MACHINE.share(replace(op, rows=4), 1e9) == pytest.approx((0.5 * 0.6) ** 0.5)


def test_experts_get_uneven_rows() -> None:
    for tokens, hit in ((1, 6.0), (4, 64 * (1 - (1 - 6 / 64) ** 4)), (300, 64.0)):
        ops = step_ops(V2_LITE, ALONE, Point(batch=tokens, context=1))
        op = next(op for op in ops if op.name == "routed experts")
        found = by_rows(op)
        assert sum(count for count, _ in found) == pytest.approx(hit, rel=1e-3)
        assert sum(count * one.operations for count, one in found) == pytest.approx(op.operations, rel=1e-3)
        assert sum(count * one.nbytes for count, one in found) == pytest.approx(op.nbytes, rel=1e-3)
    assert by_rows(next(op for op in ops if op.name == "shared experts"))[0][0] == 1
    near = step_ops(V2_LITE, ALONE, Point(batch=50, context=1))  # some experts wait for memory, some for products
    op = next(op for op in near if op.name == "routed experts")
    flat = replace(MACHINE, shares=tuple(replace(each, share=1.0) for each in SHARES))
    mean = max(op.operations / 0.1e12, op.nbytes / flat.read_rate(1e9))
    assert measured_seconds(op, HW, flat, 1e9)[0] > 1.02 * mean


def test_a_share_is_of_what_waits_longer() -> None:
    assert share_of((2.0, 10.0, 1.0), read=10.0, peak=10.0) == 0.5
    assert share_of((2.0, 1.0, 20.0), read=10.0, peak=10.0) == 1.0


def test_a_format_that_was_not_measured_is_named() -> None:
    with pytest.raises(SpecError, match=r"fp4 was not measured .* bf16, gqa, int8, mla"):
        MACHINE.share(Op(name="x", kind="product", layer=0, times=1, form="fp4"), 1.0)


def test_all_experts_count_as_gone_round_in_though_few_are_read() -> None:
    ops = step_ops(V2_LITE, ALONE, Point(batch=1, context=1))
    matrices = V2_LITE.num_parameters - V2_LITE.vocab_size * V2_LITE.hidden_size
    assert resident_bytes(ops) == pytest.approx(2 * matrices, rel=1e-3)
    assert sum(op.nbytes * op.times for op in ops) < 0.25 * resident_bytes(ops)


def test_constants_are_found_again() -> None:
    steps = []
    for cut in (2, 5):
        model = replace(V2_LITE, layers=V2_LITE.layers[:cut])
        for points in ((Point(batch=1, context=64), None), (Point(batch=9, context=64), None),
                       (None, Point(batch=1, context=300))):  # fmt: skip
            ops = step_ops(model, ALONE, *points, absorbed=True)
            around = resident_bytes(ops)
            known = sum(op.times * measured_seconds(op, HW, MACHINE, around)[0] for op in ops if op.kind != "values")
            steps.append((ops, known + effect(ops, CONSTANTS)))
    for other in (replace(V2_LITE, layers=V2_LITE.layers[:1] * 4), replace(V2_LITE, vocab_size=500),
                  replace(V2_LITE, hidden_size=512)):  # fmt: skip
        for batch in (1, 9):
            ops = step_ops(other, ALONE, Point(batch=batch, context=64))
            around = resident_bytes(ops)
            known = sum(op.times * measured_seconds(op, HW, MACHINE, around)[0] for op in ops if op.kind != "values")
            steps.append((ops, known + effect(ops, CONSTANTS)))
    found = fit_constants(steps, HW, MACHINE)
    for name in ("step", "dense_layer", "moe_layer", "stream", "value", "row", "logit"):
        assert getattr(found, name) == pytest.approx(getattr(CONSTANTS, name), rel=1e-3), name


def test_constants_are_never_below_zero() -> None:
    ops = step_ops(V2_LITE, ALONE, Point(batch=1, context=64))
    found = fit_constants([(ops, 1e-9)], HW, MACHINE)
    assert found == Constants(step=0, dense_layer=0, moe_layer=0, stream=0, value=0, row=0, logit=0)


def test_the_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(file_text(HW, MACHINE))
    assert device(str(path)) == HW
    again = read_engine(str(path))
    assert again is not None
    assert again.constants == CONSTANTS and again.reads == MACHINE.reads and again.isa == "avx512"
    assert {(each.form, each.rows): each.share for each in again.shares} == pytest.approx(
        {(each.form, each.rows): each.share for each in SHARES}
    )
    for step in (decode_step, prefill_step):
        point = Point(batch=3, context=100)
        fresh, read = (step(V2_LITE, HW, ALONE, point, Efficiency(measured=each, absorbed=True))
                       for each in (MACHINE, again))  # fmt: skip
        assert read.seconds == pytest.approx(fresh.seconds, rel=1e-3)


def test_a_device_of_the_table_or_a_plain_file_has_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("kind: gpu\nbf16_tops: 1\nmemory_gb: 1\nmemory_gbps: 1\n")
    assert read_engine(str(path)) is None and read_engine("h200") is None


@pytest.mark.parametrize("name", ["machine.yml", "machine.json"])
def test_a_file_of_either_name_has_its_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON is YAML; and a bare name is a file where its ending says so."""
    (tmp_path / name).write_text(file_text(HW, MACHINE))
    monkeypatch.chdir(tmp_path)
    assert device(name) == HW and read_engine(name) is not None
    assert read_engine("cpu:channels=8,mts=4800,cores=32,ghz=2.0/1") is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("isa: avx512", "other: 1", "'isa' is missing"), ("share: [", "share: [0.1, ", "longer|shorter"),
        ("threads: 2", "threads: -2", "-2 is not a number above 0"), ("threads: 2", "threads: [1]", "not what"),
        ("- [10000000.0, 40.0]", "- [1e+10, 40.0]", "ascending"), ("step: 0.0001", "step: .nan", "not a number"),
    ],
)  # fmt: skip
def test_a_spoilt_file_is_refused_in_a_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    path, text = tmp_path / "machine.yaml", file_text(HW, MACHINE)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError, match=words) as refused:
        read_engine(str(path))
    assert "\n" not in str(refused.value)
