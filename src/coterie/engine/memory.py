"""available_memory: bytes that this process may still take. The system's, or less if a control group says so.

Pages of files that were read count as free, as the kernel gives them back: after loading a checkpoint they are most of
what a control group is charged for. Facts only; `resolve` decides.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from coterie.kernels.cgroup import group_folders, read_text

_NAMES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""Files of the limit and the use, and what memory.stat calls cached files, by version."""


def available_memory(root: Path = Path("/")) -> int:
    """The least of the system's available memory and what each control group of the process leaves (v2 and v1)."""
    limits = [_room(folder, *_NAMES[version]) for version, folder in group_folders(root, "memory")]
    return min(int(psutil.virtual_memory().available), *(room for room in limits if room is not None), 1 << 62)


def _room(folder: Path, limit: str, usage: str, files: tuple[str, ...]) -> int | None:
    """Limit less use, cached files not counted as use; None without a limit."""
    most, used = read_text(folder / limit), read_text(folder / usage)
    if most is None or used is None or not most.isdigit() or not used.isdigit():
        return None
    counts = dict(line.partition(" ")[::2] for line in (read_text(folder / "memory.stat") or "").splitlines())
    cached = sum(int(counts.get(name, "0")) for name in files)
    return max(0, int(most) - max(0, int(used) - cached))
