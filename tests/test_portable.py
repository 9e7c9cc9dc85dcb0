"""The extension runs on any x86-64 processor and on systems as old as docs/wheels.md says.

Looks at what the newest wheel in dist/ and the newest build folder hold (`make test` makes both first). Where
qemu-user is installed the wheel also runs on processors without AVX, and with AVX2 only.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEWEST_GLIBC = (2, 34)
LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
# Functions of baseline files that measure wider units, and are called only where the processor has them.
GUARDED = re.compile(r"(read|f32|int8|amx_\w+|copy)_?(avx2|avx512|vnni|int8|bf16)?\(")
WIDE = re.compile(r"%[yz]mm|\bv[a-z0-9]+\s.*%xmm")
PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, sys.argv[1])
import numpy as np
from coterie.kernels import _native
from coterie.kernels.native import NativeKernels
from coterie.spec.weights import F32, MatrixSpec, WeightFormat
assert _native.__file__.startswith(sys.argv[1])
kernels, rng = NativeKernels(2), np.random.default_rng(1)
w, x = (rng.standard_normal((rows, 130)).astype(np.float32) for rows in (70, 5))
for format, tolerance in ((F32, 1e-5), (WeightFormat("int8", 32), 2e-2)):
    (bank,) = kernels.allocate(1, MatrixSpec(70, 130, format))
    kernels.fill(bank, 0, 0, w)
    assert np.abs(kernels.linear(x, bank) - x @ w.T).max() < tolerance * np.abs(x @ w.T).max()
print("levels", *_native.isa_levels())
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest wheel, unpacked."""
    found = sorted((ROOT / "dist").glob("coterie-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("no wheel in dist/; make wheel builds one")
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(found[-1]) as archive:
        archive.extractall(folder)
    return folder


def output(*command: str) -> str:
    """What a tool of binutils prints; skips where it is missing."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_no_symbol_is_newer_than_stated(tree: Path) -> None:
    built_with = tuple(int(part) for part in platform.libc_ver()[1].split(".")[:2])
    if built_with > (2, 36):
        pytest.skip(f"built on glibc {built_with}; wheels for others are built in the image of docs/wheels.md")
    (extension,) = (tree / "coterie" / "kernels").glob("_native*.so")
    headers = output("objdump", "-p", str(extension))
    assert set(re.findall(r"NEEDED\s+(\S+)", headers)) <= LIBRARIES
    versions = [tuple(int(part) for part in found.split(".")) for found in re.findall(r"\bGLIBC_([\d.]+)", headers)]
    assert versions and max(versions)[:2] <= NEWEST_GLIBC


def test_baseline_code_uses_no_wide_registers() -> None:
    """Objects outside the ISA levels hold no AVX instruction, but for the guarded functions."""
    objects = [path for path in (ROOT / "build").glob("*/CMakeFiles/*/**/*.o")]
    newest = {path.relative_to(ROOT / "build").parts[0]: path.stat().st_mtime for path in objects}
    if not newest:
        pytest.skip("no build folder")
    folder = ROOT / "build" / max(newest, key=lambda name: newest[name])
    baseline = [path for path in objects if path.is_relative_to(folder) and "kernels_a" not in str(path)]
    assert any("kernels_generic" in str(path) for path in baseline)
    wrong, seen = set(), 0
    for path in baseline:
        function = ""
        for line in output("objdump", "-d", "-C", "--no-show-raw-insn", str(path)).splitlines():
            if line.endswith(">:"):
                function, seen = line, seen + 1
            elif WIDE.search(line) and not (path.name == "probe.cpp.o" and GUARDED.search(function)):
                wrong.add(f"{path.name}: {function}")
    assert seen > 100 and not wrong


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "levels"), [("Nehalem", "generic"), ("Haswell", "generic avx2")])
def test_runs_on_an_old_processor(tree: Path, processor: str, levels: str) -> None:
    """Skipped without qemu-user (Debian: apt-get install qemu-user)."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed")
    command = [emulator, "-cpu", processor, sys.executable, "-c", PROGRAM, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"levels {levels}"
