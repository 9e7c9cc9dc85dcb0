"""Probes of the machine: each kind gives as many finite rates as asked, mistakes are named. No speed is asserted."""

from __future__ import annotations

import math

import pytest

from coterie.kernels import _native

ARRAY = 16 << 20


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", _native.probe_kinds())
def test_every_kind_gives_a_rate_for_each_round(kind: str, threads: int) -> None:
    rates = _native.Device(threads, "generic").probe(kind, ARRAY, 2)
    assert len(rates) == 2
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)


def test_memory_and_both_plain_units_are_always_there() -> None:
    assert _native.probe_kinds()[:5] == ["read", "read_4k", "copy", "f32", "int8"]


@pytest.mark.parametrize(
    ("kind", "nbytes", "rounds", "said"),
    [
        ("write", ARRAY, 1, "'write' is unknown"),
        ("read", 1 << 20, 1, "array of at least"),
        ("copy", -1, 1, "array of at least"),
        ("f32", ARRAY, 0, "at least one round"),
        ("read", 1 << 62, 1, "no memory"),
    ],
)
def test_mistakes_are_named(kind: str, nbytes: int, rounds: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _native.Device(1, "generic").probe(kind, nbytes, rounds)
