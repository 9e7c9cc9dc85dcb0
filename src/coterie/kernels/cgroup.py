"""Control groups of this process, versions 1 and 2: which folders may hold a limit. Facts only; no limit is read here.

A limit counts in the process's group and in every parent. In a container the tail of the path may not exist, the mount
does. `root` is "/", or a made-up tree in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def group_folders(root: Path, controller: str) -> Iterator[tuple[Literal[1, 2], Path]]:
    """(version, folder) of every group that may limit `controller` ("cpu", "memory"), mounts first."""
    mount = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield from ((2, folder) for folder in _ancestors(mount, path))
        elif controller in controllers.split(","):
            for name in sorted({controllers, controller}):
                yield from ((1, folder) for folder in _ancestors(mount / name, path))


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    folder = mount
    yield folder
    for part in path.strip("/").split("/"):
        folder = folder / part
        yield folder


def read_text(path: Path) -> str | None:
    """A small file's text without the white space around it; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
