"""The machine probe on made-up system trees: quotas of both cgroup versions, shared cores, and which limit wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.kernels import _native
from coterie.kernels.machine import choose_threads, machine, probe


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def add_cpus(root: Path, cores: list[tuple[int, int]]) -> set[int]:
    for cpu, (package, core) in enumerate(cores):
        write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(package))
        write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(core))
    return set(range(len(cores)))


def test_quota_of_cgroup_v2_is_the_tightest_ancestor(tmp_path: Path) -> None:
    cpus = add_cpus(tmp_path, [(0, core) for core in range(8)])
    write(tmp_path, "proc/self/cgroup", "0::/slice/unit")
    write(tmp_path, "sys/fs/cgroup/slice/cpu.max", "350000 100000")
    write(tmp_path, "sys/fs/cgroup/slice/unit/cpu.max", "max 100000")
    found = probe(tmp_path, cpus)
    assert (found.quota, found.threads) == (3.5, 3)
    assert found.threads_reason == "a cgroup quota of 3.5 CPUs"


def test_quota_of_cgroup_v1_inside_a_container(tmp_path: Path) -> None:
    """The path names the host's folder; the mount already is that folder."""
    cpus = add_cpus(tmp_path, [(0, core) for core in range(8)])
    write(tmp_path, "proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    found = probe(tmp_path, cpus)
    assert (found.quota, found.threads) == (0.5, 1)


def test_no_quota(tmp_path: Path) -> None:
    cpus = add_cpus(tmp_path, [(0, 0), (0, 1)])
    write(tmp_path, "proc/self/cgroup", "1:cpu:/\n0::/")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    found = probe(tmp_path, cpus)
    assert found.quota is None
    assert (found.threads, found.threads_reason) == (2, "2 physical cores")


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    cpus = add_cpus(tmp_path, [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 0)])
    assert probe(tmp_path, cpus).cores == 3
    assert probe(tmp_path, {0, 2}).threads == 1


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert probe(tmp_path, {0, 3, 5}).cores == 3


@pytest.mark.parametrize(
    ("cpus", "cores", "quota", "threads", "word"),
    [(4, 4, None, 4, "physical"), (2, 2, 8.0, 2, "physical"), (8, 8, 4.9, 4, "quota"), (8, 8, 0.2, 1, "quota")],
)
def test_the_smallest_limit_wins(cpus: int, cores: int, quota: float | None, threads: int, word: str) -> None:
    got, reason = choose_threads(cpus, cores, quota)
    assert got == threads
    assert word in reason


def test_this_machine_is_probed_once() -> None:
    found = machine()
    assert found is machine()
    assert found.threads >= 1
    assert found.isa_levels == tuple(_native.isa_levels())
    assert found.isa_levels[0] == "generic"
