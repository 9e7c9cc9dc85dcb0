"""kernels.py: a line for every level, rates against the limits of the same round."""

from __future__ import annotations

import sys

import pytest

import kernels as benchmark
from coterie.engine.limits import Limits, Rate


@pytest.mark.parametrize("name", ["bf16", "int8 g32", "mxfp4"])
def test_a_table_of_small_matrices(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = Limits(0, tuple(Rate(probe, 1, (1e9,)) for probe in ("read", "f32", "int8")))
    monkeypatch.setattr(benchmark, "measure_limits", lambda *_, **__: limits)
    arguments = ["kernels.py", "--tiny", "--isa", "generic", "--rounds", "1", "--threads", "1", "--format", name]
    monkeypatch.setattr(sys, "argv", arguments)
    benchmark.main()
    head, _, line = capsys.readouterr().out.strip().splitlines()
    assert "GB/s, 1 row (of read)" in head
    assert line.startswith(f"| {name} | generic | ")
    assert line.count("%") == 3


def test_levels_are_held_against_their_own_unit() -> None:
    probes = {"f32": 1.0, "int8": 2.0, "amx_int8": 3.0, "amx_bf16": 4.0}
    for isa, name, wanted in (("avx512", "bf16", 1), ("amx", "bf16", 4), ("amx", "f32", 1), ("amx", "mxfp4", 3),
                              ("avx2", "mxfp4", 2)):  # fmt: skip
        assert benchmark.unit_of(isa, benchmark.FORMATS[name], probes) == wanted
