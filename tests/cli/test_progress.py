"""Progress while loading and the line about speed: what is said, where, and that nothing divides by zero."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coterie.cli import common
from coterie.cli.common import LoadProgress, Timing, load_line, size


def test_load_line_says_share_rate_and_time_left():
    assert load_line(25_000_000, 100_000_000, 5.0) == "loading 25 % (25.0 MB of 100.0 MB, 5.0 MB/s, 15 s left)"
    assert "time left unknown" in load_line(0, 100, 0.0)
    assert load_line(0, 0, 1.0).startswith("loading 100 %")


@pytest.mark.parametrize(
    ("num_bytes", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (20e6, "20.0 MB"), (1.34e12, "1340.0 GB")]
)
def test_sizes_use_decimal_units(num_bytes, said):
    assert size(num_bytes) == said


def test_plain_lines_come_every_two_seconds_off_a_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with LoadProgress(Console(file=out, width=20)) as progress:
        now[0] += 60.0  # imports and checks come before the first byte
        for step in range(40):
            progress(step, 40)
            now[0] += 0.125
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "loading 80 % (32 B of 40 B, 8 B/s, 1 s left)"
    assert all(line.startswith("loading ") and line.endswith(" s left)") for line in lines)
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away():
    out = io.StringIO()
    with LoadProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress(10_000_000, 40_000_000)
        progress(40_000_000, 40_000_000)
    shown = out.getvalue()
    assert "40.0/40.0 MB" in shown
    assert shown.rstrip("\n").endswith("\x1b[2K")


def test_timing_line_says_only_what_was_measured():
    assert Timing(312, 128, 12.18, 0.84).line() == "312 tok in · 128 out · TTFT 0.84 s · 11.2 tok/s"
    assert Timing(3, 1, 0.5, 0.5).line() == "3 tok in · 1 out · TTFT 0.50 s"
    assert Timing(3, 0, 0.5).line() == "3 tok in · 0 out"
    assert Timing(300, 128, 12.0, 0.75).prompt_rate == 400.0
    assert Timing(3, 0, 0.5).prompt_rate is None
    assert Timing(3, 2, 0.5, 0.5).decode_rate is None
