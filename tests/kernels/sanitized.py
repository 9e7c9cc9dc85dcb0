"""Runs kernel tests on a sanitizer build, in the process that test_sanitizers starts. No tests here.

    python sanitized.py TREE THREADS PICKS [pytest arguments]

TREE holds the installed sanitizer build and comes first on the path, before an editable install as well. Of every test
function PICKS cases per ISA level are kept, drawn by a seed that is THREADS; a backend that a test makes with its usual
two threads gets THREADS. Exit code as pytest's; a sanitizer's report ends the process with 99.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


class Subset:
    """Keeps a few cases of every test function, each ISA level among them."""

    def __init__(self, seed: int, picks: int) -> None:
        self.random = random.Random(seed)
        self.picks = picks

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        groups: dict[tuple[object, ...], list[Any]] = defaultdict(list)
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            level = params.get("isa", params.get("native"))
            groups[item.location[0], item.originalname, str(level)].append(item)
        drawn = [self.random.sample(group, min(len(group), self.picks)) for group in groups.values()]
        kept = {id(item) for group in drawn for item in group}
        items[:] = [item for item in items if id(item) in kept]


def check_fence(kernels: Any) -> None:
    """The byte after a bank is forbidden: AddressSanitizer is there, and the build tells it of its memory."""
    from coterie.spec.weights import F32, MatrixSpec

    poisoned = getattr(ctypes.CDLL(None), "__asan_region_is_poisoned", None)
    if poisoned is None:
        return
    (bank,) = kernels.allocate(1, MatrixSpec(32, 64, F32))
    units = kernels.units(bank)
    poisoned.argtypes, poisoned.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    assert poisoned(units.ctypes.data, units.nbytes) is None
    assert poisoned(units.ctypes.data + units.nbytes, 1) is not None


def main(tree: Path, threads: int, picks: int, arguments: list[str]) -> int:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
    sys.path.insert(0, str(tree))
    import pytest

    from coterie.kernels import _native, native

    assert Path(_native.__file__).is_relative_to(tree), f"{_native.__file__} is not the sanitizer build in {tree}"
    plain = native.NativeKernels.__init__

    def init(self: Any, count: int = 1, isa: str | None = None) -> None:
        plain(self, threads if count == 2 else count, isa)

    native.NativeKernels.__init__ = init  # type: ignore[method-assign]
    check_fence(native.NativeKernels())
    return int(pytest.main([*arguments, "-q", "-x", "-p", "no:cacheprovider"], plugins=[Subset(threads, picks)]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
