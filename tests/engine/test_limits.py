"""Limits: the size of the array, which unit serves which weights, and a real measurement's shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.engine.limits import LARGEST_ARRAY, Limits, Rate, array_bytes, measure_limits
from coterie.spec.errors import CoterieError


def caches(root: Path, *sizes: str) -> Path:
    for index, size in enumerate(sizes):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    return root


@pytest.mark.parametrize(
    ("sizes", "free", "expected"),
    [
        (["32K", "2048K", "32768K"], 1 << 40, 1 << 30),
        (["48K", "2M", "400M"], 1 << 40, 1600 << 20),
        (["48K", "2M", "1G"], 1 << 40, LARGEST_ARRAY),
        ([], 1 << 40, 1 << 30),
        (["what", ""], 1 << 40, 1 << 30),
        (["32M"], 4 << 30, 512 << 20),
    ],
)
def test_array_is_far_larger_than_the_caches_and_leaves_memory(tmp_path, sizes, free, expected):
    assert array_bytes(caches(tmp_path, *sizes), lambda: free) == expected


def test_too_little_memory_is_refused(tmp_path):
    with pytest.raises(CoterieError, match="64 MiB"):
        array_bytes(tmp_path, lambda: 256 << 20)


def test_weights_count_against_the_fastest_unit_that_serves_them():
    names = {"f32": 1.0, "int8": 4.0, "amx_int8": 60.0, "amx_bf16": 30.0}
    with_amx = Limits(0, tuple(Rate(name, 2, (value, value, 100.0)) for name, value in names.items()))
    peaks = {kind: with_amx.matrix_peak(kind, 2) for kind in ("f32", "bf16", "fp8", "int8", "code4", "affine8")}
    assert peaks == {"f32": 1.0, "bf16": 30.0, "fp8": 30.0, "int8": 60.0, "code4": 60.0, "affine8": 60.0}
    plain = Limits(0, tuple(rate for rate in with_amx.rates if "amx" not in rate.probe))
    assert (plain.matrix_peak("bf16", 2), plain.matrix_peak("int8", 2)) == (1.0, 4.0)
    assert plain.find("read", 2) is None


def test_measured_with_one_thread_and_with_all(monkeypatch):
    monkeypatch.setattr("coterie.engine.limits.array_bytes", lambda: 64 << 20)
    found = measure_limits(2, rounds=4, probes=("read", "f32"), single=True)
    assert {(rate.probe, rate.threads) for rate in found.rates} == {(p, t) for p in ("read", "f32") for t in (1, 2)}
    assert all(len(rate.values) >= 4 and min(rate.values) > 0 for rate in found.rates)
