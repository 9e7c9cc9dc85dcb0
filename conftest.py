"""Test session helper: prints how long each tests/<folder> took, so that a slow part is seen at once. No fixtures.

No example of a property test has a deadline: a busy machine is no fault of the code, and timing is never asserted.

The oracle's tiny tensors need no second thread: OpenMP's wait for each other by spinning, which on a busy machine takes
several times the work.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import PurePosixPath

import hypothesis
import pytest

hypothesis.settings.register_profile("coterie", deadline=None)
hypothesis.settings.load_profile("coterie")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here or in a process that a test starts


class FolderTimes:
    """Adds up the seconds of set-up, call and tear-down per folder below tests/."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = PurePosixPath(report.nodeid.partition("::")[0]).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        self.seconds[folder] += report.duration
        self.tests[folder].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds per folder")
        for folder, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:8.1f} s  {len(self.tests[folder]):5d} tests  {folder}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FolderTimes(), "folder-times")
