"""Memory that may be had: the system's, or what a made-up tree of control groups leaves."""

from __future__ import annotations

from pathlib import Path

import psutil

from coterie.engine.memory import available_memory


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups_the_system(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > psutil.virtual_memory().available // 2
    unlimited = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}
    assert available_memory(tree(tmp_path, unlimited)) > psutil.virtual_memory().available // 2


def test_the_tightest_group_of_version_2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/box/inner\n",
        "sys/fs/cgroup/box/memory.max": "1000",
        "sys/fs/cgroup/box/memory.current": "300",
        "sys/fs/cgroup/box/inner/memory.max": "5000",
        "sys/fs/cgroup/box/inner/memory.current": "200",
    }
    assert available_memory(tree(tmp_path, files)) == 700
    stat = "anon 10\ninactive_file 150\nactive_file 50\n"
    assert available_memory(tree(tmp_path, {"sys/fs/cgroup/box/memory.stat": stat})) == 900
    assert available_memory(tree(tmp_path, {"sys/fs/cgroup/box/memory.current": "2000"})) == 0


def test_version_1_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "600",
        "sys/fs/cgroup/memory/memory.stat": "cache 500\ntotal_inactive_file 100\n",
    }
    assert available_memory(tree(tmp_path, files)) == 500
