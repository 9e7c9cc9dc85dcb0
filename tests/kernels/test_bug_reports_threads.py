"""Bug report H2: threads follow the container, not the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_machine import add_cpus, write

from coterie.kernels.machine import probe
from coterie.kernels.select import select


@pytest.mark.parametrize("version", ["v2", "v1"])
@pytest.mark.parametrize(
    ("quota", "affinity", "cores", "threads", "reason"),
    [
        ("765000", 16, 16, 7, "a cgroup quota of 7.65 CPUs"),
        ("400000", 8, 8, 4, "a cgroup quota of 4 CPUs"),
        ("765000", 6, 16, 6, "6 physical cores"),
        ("765000", 16, 4, 4, "4 physical cores"),
        ("90000", 8, 8, 1, "a cgroup quota of 0.9 CPUs"),
        (None, 5, 16, 5, "5 physical cores"),
    ],
)
def test_h2_least_of_affinity_whole_quota_and_cores(
    tmp_path: Path, version: str, quota: str | None, affinity: int, cores: int, threads: int, reason: str
) -> None:
    """16 CPUs on `cores` cores, `affinity` of them allowed, `quota` microseconds of CPU per 100 ms."""
    add_cpus(tmp_path, [(0, cpu % cores) for cpu in range(16)])
    if version == "v2":
        write(tmp_path, "proc/self/cgroup", "0::/box")
        write(tmp_path, "sys/fs/cgroup/box/cpu.max", f"{quota or 'max'} 100000")
    else:
        write(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/box\n0::/")
        write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", quota or "-1")
        write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    found = probe(tmp_path, set(range(affinity)))
    assert (found.threads, found.threads_reason) == (threads, reason)


def test_h2_the_choice_is_reported_with_its_reason_and_one_flag_overrides() -> None:
    _, chosen = select("native")
    threads = {choice.what: choice for choice in chosen}["threads"]
    assert int(threads.value) >= 1 and any(word in threads.reason for word in ("cores", "quota", "affinity"))
    _, chosen = select("native", threads=3)
    threads = {choice.what: choice for choice in chosen}["threads"]
    assert threads.value == "3" and "asked for" in threads.reason
