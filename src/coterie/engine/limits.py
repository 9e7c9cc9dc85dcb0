"""Limits of this machine, measured: what memory and multipliers give at most to the threads that serve.

The probes are the native extension's (`kernels/native/probe.h`); this file chooses the array, goes round the probes
several times, so that a slow moment of the host falls on all of them, and keeps medians. Bytes and operations a second.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coterie.engine.memory import available_memory
from coterie.kernels import _native
from coterie.kernels.cgroup import read_text
from coterie.kernels.machine import machine
from coterie.spec.errors import CoterieError

MEMORY_PROBES = ("read", "read_4k", "copy")
SMALLEST_ARRAY, LARGEST_ARRAY = 64 << 20, 2 << 30
ROUNDS_PER_VISIT = 3

UNITS_OF_KIND = {"f32": ("f32",), "bf16": ("f32", "amx_bf16"), "fp8": ("f32", "amx_bf16")}
"""Multipliers that can serve weights of a kind; any other kind is integer codes, which `int8` and `amx_int8` serve."""
INTEGER_UNITS = ("int8", "amx_int8")


@dataclass(frozen=True, slots=True)
class Rate:
    """One probe with so many threads. Bytes or operations a second; `values`: every round."""

    probe: str
    threads: int
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_memory(self) -> bool:
        return self.probe in MEMORY_PROBES


@dataclass(frozen=True, slots=True)
class Limits:
    """Every probe of one machine. `array_bytes`: what the memory probes walked."""

    array_bytes: int
    rates: tuple[Rate, ...]

    def find(self, probe: str, threads: int) -> Rate | None:
        """The rate of a probe, if this machine has it."""
        return next((rate for rate in self.rates if (rate.probe, rate.threads) == (probe, threads)), None)

    def matrix_peak(self, kind: str, threads: int) -> float:
        """Operations a second of the fastest unit that serves weights of `kind`, whatever level the kernels use."""
        units = UNITS_OF_KIND.get(kind, INTEGER_UNITS)
        return max(rate.median for unit in units if (rate := self.find(unit, threads)) is not None)


def measure_limits(
    threads: int | None = None, *, rounds: int = 9, probes: tuple[str, ...] = (), single: bool = False
) -> Limits:
    """Measure this machine with `threads` (None: as many as it allows), and with one thread too if `single`.

    `probes` empty: all that it has. Raises `CoterieError` where not even a small array fits in memory.
    """
    count = threads or machine().threads
    array = array_bytes()
    devices = {number: _native.Device(number, "generic") for number in ({1, count} if single else {count})}
    asked = [probe for probe in _native.probe_kinds() if not probes or probe in probes]
    values: dict[tuple[str, int], list[float]] = {(probe, number): [] for number in devices for probe in asked}
    for _ in range(-(-rounds // ROUNDS_PER_VISIT)):
        for (probe, number), gathered in values.items():
            gathered += devices[number].probe(probe, array, min(rounds, ROUNDS_PER_VISIT))
    return Limits(array, tuple(Rate(probe, number, tuple(found)) for (probe, number), found in values.items()))


def array_bytes(root: Path = Path("/"), available: Callable[[], int] = available_memory) -> int:
    """Four times the last cache, at least 1 GiB, at most 2 GiB and an eighth of free memory.

    Some hosts report the cache of a whole socket to a guest that has a share of it, hence the upper bound.
    """
    wanted = min(LARGEST_ARRAY, max(1 << 30, 4 * max(_cache_sizes(root), default=0)))
    size = min(wanted, available() // 8)
    if size < SMALLEST_ARRAY:
        raise CoterieError(
            f"measuring memory needs an array of at least {SMALLEST_ARRAY >> 20} MiB and leaves seven eighths of free "
            "memory alone; less than that is free, so end other programs or raise the memory limit"
        )
    return size


def _cache_sizes(root: Path) -> Iterator[int]:
    """Bytes of each cache of the first CPU, as the system tells."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for folder in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        text = (read_text(folder / "size") or "").strip()
        if text[:-1].isdigit() and text[-1:] in scale:
            yield int(text[:-1]) * scale[text[-1]]
