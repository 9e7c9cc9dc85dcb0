"""The kernel tests on builds with AddressSanitizer + UndefinedBehaviorSanitizer and with ThreadSanitizer.

A subset of the cases (see sanitized.py), on every ISA level and with 1, 2 and 3 threads, in a process of its own. In
such a build memory that the kernels hand out in pieces is fenced, and weights end at a fence (guard.h). A failure shows
the report. Needs the compiler and g++'s sanitizer libraries, and what builds the extension.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")
# What computes nothing, or starts processes of its own, or times itself.
LEFT_OUT = ("test_sanitizers.py", "test_select.py", "test_machine.py", "test_bug_reports_threads.py", "test_probe.py")
# glibc frees a finished thread's thread-local storage without telling the sanitizer who was done with it.
KNOWN = "race:_dl_deallocate_tls\n"
PLAIN = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@cache
def library(name: str) -> str:
    """Path of a library of the compiler; skips where there is no such compiler or library."""
    try:
        found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no GNU compiler to build with: {error}")
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"{COMPILER} has no {name}")
    return str(path)


def build(folder: Path, sanitizers: str) -> Path:
    """Install the package, its kernels built with these sanitizers, into a folder."""
    tree = folder / "tree"
    isolated = not all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tree), str(ROOT)]
    settings = (f"build-dir={folder / 'build'}", f"cmake.define.COTERIE_SANITIZE={sanitizers}", "install.strip=false")
    command += [f"--config-settings={setting}" for setting in settings]  # pip before 23.1 has no -C
    command += [] if isolated else ["--no-build-isolation"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree


@pytest.fixture(scope="session")
def address_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library("libasan.so")
    return build(tmp_path_factory.mktemp("asan"), "address,undefined")


@pytest.fixture(scope="session")
def thread_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library("libtsan.so")
    return build(tmp_path_factory.mktemp("tsan"), "thread")


def run(tree: Path, runtime: str, threads: int, arguments: list[str]) -> None:
    """Run tests on a build; `arguments` are the picks per test and level, then pytest's."""
    reports = tree.parent / f"report-{threads}"
    known = tree.parent / "known"
    known.write_text(KNOWN)
    shared = f"log_path={reports}:exitcode=99"
    options = {
        "ASAN_OPTIONS": f"{shared}:detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": f"{shared}:print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"{shared}:halt_on_error=1:suppressions={known}",
        "LD_PRELOAD": f"{library(runtime)} {library('libstdc++.so')}",
    }
    command = [sys.executable, str(FOLDER / "sanitized.py"), str(tree), str(threads), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **PLAIN, **options})
    said = "".join(path.read_text() for path in sorted(reports.parent.glob(f"{reports.name}*")))
    assert not said, said
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_bad_access_and_no_undefined_behaviour(address_build: Path, threads: int) -> None:
    left_out = [f"--ignore={FOLDER / name}" for name in LEFT_OUT]
    run(address_build, "libasan.so", threads, ["1", str(FOLDER), *left_out])


@pytest.mark.parametrize("threads", [2, 3])
def test_no_data_race(thread_build: Path, threads: int) -> None:
    files = ("test_native_edges.py", "test_native_bits.py", "test_native_moe.py", "test_weight_formats.py")
    run(thread_build, "libtsan.so", threads, ["1", *(str(FOLDER / name) for name in files)])
