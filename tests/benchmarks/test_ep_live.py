"""ep_live.py: ranks serve while one is killed and while experts move; a real run of the smallest shape of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ep_live import steps
from make_checkpoint import Cut, make_checkpoint

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ep_live.py"
FLAGS = ["--ranks", "2", "--redundant", "8", "--streams", "2"]
"""Both ranks hold every expert of eight, so either may be lost."""


def rows_of(table: str) -> list[list[str]]:
    """The cells of a printed table's rows."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]


def run(model: Path, *options: str) -> str:
    command = [sys.executable, str(SCRIPT), str(model), *FLAGS, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return make_checkpoint("tiny-v2", tmp_path_factory.mktemp("ep-live") / "model", Cut())


def test_a_step_lies_between_two_tokens_of_one_stream() -> None:
    assert steps([[0, 1, 2, 3, 4, 6, 9], [10, 20]]) == [(4, 6), (6, 9)], "the first tokens come with prompts"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_rank_is_reported_with_its_times(model: Path) -> None:
    (row,) = rows_of(run(model, "--kill", "--rank", "1", "--tokens", "600"))
    rank, known, serving, token, moved, read, longest, before, after, tokens, back = row
    assert (rank, moved, read, tokens) == ("1", "0", "0", "the same")
    assert 0 < float(known) <= float(serving) <= float(token) <= float(back)
    assert float(longest) > 0 and float(before) >= 0 and float(after) >= 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_moves_are_counted_and_groups_without_them_move_nothing(model: Path) -> None:
    out = run(model, "--moves", "--tokens", "60", "--rounds", "1", "--steps", "5", "--rate", "1000")
    still, moving = rows_of(out)
    assert still[0] == "none" and still[5:] == ["0", "0"]
    assert moving[0] == "every 5 steps, 1000 MB/s" and int(moving[6]) > 0
    assert all(0 < float(row[1]) <= float(row[3]) for row in (still, moving))
