"""serving.py: the same load for everyone, the ladder ends where bounds break, tables and ratios; a real small run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import Cut, make_checkpoint
from rich.console import Console
from serving import Contest, Shape, best_goodput, command_of, entrants, ratio_line, tables

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "serving.py"


def step(goodput: float, good: int = 5) -> dict[str, Any]:
    names = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "output_throughput")
    return {"request_goodput": goodput, "good_requests": good, "num_prompts": 6} | dict.fromkeys(names, 10.0)


def one(*goodputs: float, gap: float = 50.0) -> dict[str, Any]:
    long = {"chunk_ms": 100.0, "running": 4, "gap_before_ms": 9.0, "gap_after_ms": gap, "long_ttft_ms": 300.0}
    return {"ladder": {f"{2**i}": step(goodput) for i, goodput in enumerate(goodputs)}, "long": long}


def test_goodput_is_the_best_rate_and_ratios_are_within_rounds() -> None:
    assert best_goodput(one(1.0, 3.0, 2.0)["ladder"]) == 3.0
    rounds = [
        {"coterie-int8": one(1.0, 4.0), "llama-q8_0": one(1.0), "vllm": one(2.0)},
        {"coterie-int8": one(1.0, 2.0), "llama-q8_0": one(0.5), "vllm": one(0.4)},
    ]
    assert ratio_line(rounds) == "goodput, best of ours : best of the others: 3.00 (2.00 .. 4.00)"
    assert "no ratio" in ratio_line([{"coterie-int8": one(1.0), "vllm": one(0.0)}])
    console = Console(record=True, width=120)
    console.print(*tables(rounds))
    text = console.export_text()
    rows = [line.split() for line in text.splitlines()]
    assert ["coterie-int8", "3.00", "100", "9", "50", "0.50", "300", "4"] in rows
    assert ["2", "coterie-int8", "5/6", "3.00", "10", "10", "10", "10", "10"] in rows


class Ladder(Contest):
    """Servers whose goodput falls with the rate; nothing is sent."""

    def __init__(self, breaks_at: dict[str, float]) -> None:
        self.servers = [type("Server", (), {"name": name, "process": None})() for name in breaks_at]
        self.breaks_at, self.asked = breaks_at, []

    async def step(self, server: Any, rate: float, number: int) -> dict[str, Any]:
        self.asked.append((rate, server.name))
        return step(rate, good=2 if rate >= self.breaks_at[server.name] else 6) | {"failed": 0}

    async def long_prompt(self, server: Any, number: int) -> dict[str, float]:
        return {"chunk_ms": 1.0}

    async def _warm_up(self, server: Any) -> None:
        return None


def test_who_breaks_the_bounds_climbs_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.send_signal", lambda process, number: None)
    contest = Ladder({"a": 2.0, "b": 1.0})
    found = contest.round(0, [0.5, 1.0, 2.0, 4.0], lambda line: None)
    assert contest.asked == [(0.5, "a"), (0.5, "b"), (1.0, "a"), (1.0, "b"), (2.0, "a")]
    assert list(found["b"]["ladder"]) == ["0.5", "1"]


def test_everyone_gets_the_same_texts_of_exact_length(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_checkpoint("tiny-v2", tmp_path / "model", Cut())
    contest = Contest([], folder, Shape(), (("ttft", 1.0),))
    prompts = contest.texts(3, 64, 8, seed=5)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [len(library.encode(prompt.content, add_special_tokens=False).ids) for prompt in prompts] == [64] * 3
    assert prompts == contest.texts(3, 64, 8, seed=5) != contest.texts(3, 64, 8, seed=6)


def test_commands_give_every_engine_the_same_limits() -> None:
    for entrant in entrants(2):
        if entrant.engine == "transformers":
            continue
        command, extra = command_of(entrant, Path("model"), 1234, "python", 512)
        assert "1234" in command and "512" in command and ("2" in command or extra)


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    from serving import started

    entrant = next(entrant for entrant in entrants(1) if entrant.name == "coterie-bf16")
    with (
        pytest.raises(RuntimeError, match=r"coterie-bf16 did not start: error: there is no model folder"),
        started(entrant, tmp_path / "nowhere", sys.executable, 64, tmp_path / "log"),
    ):
        raise AssertionError("it runs")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--quick", "--entrants", "coterie-bf16,coterie-int8",
               "--rates", "2", "--goodput", "ttft:60000", "tpot:60000"]  # fmt: skip
    for rounds in (1, 2):
        result = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
        assert result.returncode == 0, result.stderr
        assert f"tiny-v2, {rounds} rounds" in result.stdout
    assert re.search(r" (\d+)/\1 ", result.stdout), "all requests of a step are good"
    assert "no peer had a good request" in result.stdout
