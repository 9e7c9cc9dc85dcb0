"""available_memory: bytes that this process may still take. The system's, or less if a control group says so.

Pages of files that were read count as free, as the kernel gives them back: after loading a checkpoint they are most of
what a control group is charged for. Facts only; `resolve` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def available_memory(root: Path = Path("/")) -> int:
    """The least of the system's available memory and what each control group of the process leaves (v2 and v1)."""
    return min(int(psutil.virtual_memory().available), *_group_rooms(root / "proc/self/cgroup", root / "sys/fs/cgroup"))


def _group_rooms(membership: Path, mount: Path) -> Iterator[int]:
    names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
    old_names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
    yield 1 << 62
    for line in (_read(membership) or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            folders, (limit, usage, files) = _ancestors(mount, path), names
        elif "memory" in controllers.split(","):
            folders, (limit, usage, files) = _ancestors(mount / "memory", path), old_names
        else:
            continue
        for folder in folders:
            room = _room(folder / limit, folder / usage, folder / "memory.stat", files)
            if room is not None:
                yield room


def _room(limit: Path, usage: Path, stat: Path, files: tuple[str, ...]) -> int | None:
    """Limit less use, cached files not counted as use; None without a limit."""
    most, used = _read(limit), _read(usage)
    if most is None or used is None or not most.isdigit() or not used.isdigit():
        return None
    counts = dict(line.partition(" ")[::2] for line in (_read(stat) or "").splitlines())
    cached = sum(int(counts.get(name, "0")) for name in files)
    return max(0, int(most) - max(0, int(used) - cached))


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The mount and each folder from it down to `path`; in a container the tail may not exist."""
    folder = mount
    yield folder
    for part in path.strip("/").split("/"):
        folder = folder / part
        yield folder


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
