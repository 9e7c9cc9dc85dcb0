"""plan_speed.py: it measures what it says, on few requests."""

import sys

import plan_speed
import pytest


def test_it_prints_a_line_for_each_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_speed.py", "--requests", "30", "--no-commands"])
    plan_speed.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    for line in lines[1:]:
        ranks, _, steps, rank_steps = (float(cell.replace(",", "")) for cell in line.split())
        assert steps > 0 and rank_steps == pytest.approx(ranks * steps, rel=0.01)
