"""Machine: what this process may use, probed once into a frozen record. Facts only; `select` decides.

Threads = min(CPUs in the affinity mask, whole CPUs of the cgroup quota, physical cores in the mask): more threads than
a quota allows are throttled all at once, and two threads on one core share its multipliers. Not here: memory, NUMA.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coterie.kernels import _native
from coterie.kernels.cgroup import group_folders, read_text


@dataclass(frozen=True, slots=True)
class Machine:
    """`isa_levels`: usable levels, best last. `refused_levels`: (level, reason) of those the processor has but that
    failed their check. `quota`: CPUs that the cgroups grant, None without a limit."""

    arch: str
    isa_levels: tuple[str, ...]
    cpus: int
    cores: int
    quota: float | None
    threads: int
    threads_reason: str
    refused_levels: tuple[tuple[str, str], ...] = ()


@cache
def machine() -> Machine:
    """The record of this process, probed at the first call."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return probe(Path("/"), affinity)


def probe(root: Path, affinity: set[int]) -> Machine:
    """Read the facts below `root` (tests give a made-up tree) for a process bound to the CPUs of `affinity`."""
    cores, quota = _physical_cores(root, affinity), _cpu_quota(root)
    threads, reason = choose_threads(len(affinity), cores, quota)
    return Machine(
        arch=platform.machine(),
        isa_levels=tuple(_native.isa_levels()),
        cpus=len(affinity),
        cores=cores,
        quota=quota,
        threads=threads,
        threads_reason=reason,
        refused_levels=tuple(_native.refused_levels()),
    )


def choose_threads(cpus: int, cores: int, quota: float | None) -> tuple[int, str]:
    """The smallest of the limits, and the words that say which one it was."""
    limits = [(cores, f"{cores} physical cores"), (cpus, f"{cpus} CPUs in the affinity mask")]
    if quota is not None:
        limits.append((max(1, int(quota)), f"a cgroup quota of {quota:g} CPUs"))
    threads, reason = min(limits, key=lambda limit: limit[0])
    return threads, reason


def _physical_cores(root: Path, affinity: set[int]) -> int:
    """Distinct (package, core) pairs among the CPUs; every CPU counts as a core where the system does not say."""
    found = set()
    for cpu in affinity:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = read_text(topology / "physical_package_id"), read_text(topology / "core_id")
        found.add((package, core) if core is not None else ("cpu", str(cpu)))
    return len(found)


def _cpu_quota(root: Path) -> float | None:
    """The tightest CPU limit of the process's cgroup and its parents, version 1 or 2."""
    groups = group_folders(root, "cpu")
    limits = [_limit_v2(folder) if version == 2 else _limit_v1(folder) for version, folder in groups]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v2(folder: Path) -> float | None:
    fields = (read_text(folder / "cpu.max") or "max").split()
    return None if fields[0] == "max" else int(fields[0]) / int(fields[1])


def _limit_v1(folder: Path) -> float | None:
    quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if quota is None or period is None or int(quota) <= 0:
        return None
    return int(quota) / int(period)
