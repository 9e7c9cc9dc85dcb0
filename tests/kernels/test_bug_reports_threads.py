"""Bug report H2: threads follow the container, not the host; nothing spins once the answer is out."""

from __future__ import annotations

import subprocess
import sys
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


IDLE = """
import time
import numpy as np
from coterie.kernels.native import NativeKernels
kernels = NativeKernels(4)
bank = kernels.allocate(1, 512, 512, "f32")
x = np.ones((64, 512), np.float32)
for _ in range(20):
    kernels.linear(x, bank)
time.sleep(0.3)
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
"""


def test_h2_threads_sleep_when_there_is_nothing_to_do() -> None:
    """CPU seconds of a second without work: four spinning threads would burn as many as the machine has cores."""
    result = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=120, check=True)
    assert float(result.stdout) < 0.1
