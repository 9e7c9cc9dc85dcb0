"""`coterie plan net`, `imbalance` and `pods`: their numbers as JSON, their tables, their refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import run

PAPER = ("r1", "--hardware", "b200-paper")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_net_gives_the_two_published_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "net", *PAPER, "-n", "32")
    by_links = {(way["links"], way["form"]): way for way in found["ways"]}
    switch, network = by_links["switch of 32", "copies"], by_links["network only", "copies"]
    assert switch["dispatch_ideal"]["value"] == pytest.approx(17.65e-6, rel=0.01)
    assert network["dispatch_ideal"]["value"] == pytest.approx(151.8e-6, rel=0.01)
    assert switch["scaleup_bytes"]["value"] == pytest.approx(15.23e6, rel=0.01)
    torus = by_links["3D torus 4 x 4 x 2", "copies"]
    assert torus["dispatch_ideal"]["value"] > 2 * switch["dispatch_ideal"]["value"]
    measured = {row["id"]: row["seconds"]["value"] for row in found["published"]}
    assert measured["a2a-047"] == pytest.approx(37.8e-6) and measured["a2a-005"] == pytest.approx(155e-6)
    assert min(measured.values()) > 2 * switch["dispatch_ideal"]["value"]
    assert answer(capsys, "net", *PAPER, "-n", "32", "--tokens", "100")["published"] == []
    assert all(set(way["dispatch"]) >= {"value", "p10", "p90", "unit", "kind", "formula"} for way in found["ways"])


def test_net_shows_a_table_and_takes_measured_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "net", "r1", "--hw", "h100", "-n", "64", "--dispatch", "fp8"]) == 0
    shown = capsys.readouterr().out
    assert "* switch of 8 and network" in shown and "per node" in shown and "3D torus 4 x 4 x 4" in shown
    slow = answer(capsys, "net", *PAPER, "-n", "32", "--alpha-us", "20", "--share", "0.5")
    first = slow["ways"][0]
    assert first["dispatch"]["value"] == pytest.approx(20e-6 + 2 * (first["dispatch_ideal"]["value"] - 0.8e-6))
    assert first["dispatch"]["kind"] == "derived"


def test_on_cpus_net_counts_this_engines_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "linked.yaml"
    path.write_text("kind: cpu\nbf16_tops: 15\nint8_tops: 30\nmemory_gb: 500\nmemory_gbps: 300\n"
                    "scaleup_gbps: 60\ndomain: 4\n")  # fmt: skip
    net = ("net", "r1", "--hw", str(path), "-n", "4", "--weights", "int8")

    def sent(*more: str) -> tuple[float, float]:
        first = next(way for way in answer(capsys, *net, *more)["ways"] if way["form"] == "rank")
        seconds = [first[name]["value"] - 0.8e-6 for name in ("dispatch_ideal", "combine_ideal")]
        return seconds[0] * 60e9, seconds[1] * 60e9

    hidden = 7168
    out, back = sent()
    assert back == pytest.approx(sent("--exchange-dtype", "bfloat16")[1] * 2)
    assert out == pytest.approx(sent("--weights", "bf16")[0] * (1 + 4 / 128) / 4)
    assert sent("--weights", "int4")[0] == pytest.approx(sent("--weights", "bf16")[0] * (1 + 4 / 32) / 4)
    assert back == pytest.approx(128 * 8 * hidden * 4 * 3 / 4, rel=0.2)  # with the busiest rank's share
    assert sent("--dispatch", "bf16")[1] < back / 2  # sums of rows return there
    assert "this engine" in fails(capsys, "net", "r1", "--hw", "h100", "-n", "8", "--exchange-dtype", "bfloat16")


def test_a_device_without_links_says_so_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "net", "r1", "--hw", "v6e", "-n", "512", "--ep", "512")
    assert any("network" in way.get("refused", "") for way in found["ways"])


def test_imbalance_ranks_placements_and_reads_the_users_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = answer(capsys, "imbalance", *PAPER, "-n", "32", "--tokens", "256", "--skew", "trace")
    order, shuffled, balanced, copied = (row["rank"]["value"] for row in found["rows"])
    assert order > shuffled > balanced > copied >= 1
    assert found["rows"][1]["rank"]["p10"] < shuffled < found["rows"][1]["rank"]["p90"]
    steps = [row["step"]["value"] for row in found["rows"]]
    assert steps[0] > steps[1] > steps[2] > steps[3] > 0
    path = tmp_path / "counts.csv"
    path.write_text("\n".join(",".join(str(1000 if expert < 64 else 100) for expert in range(256)) for _ in range(3)))
    rows = answer(capsys, "imbalance", *PAPER, "-n", "32", "--skew", str(path))["rows"]
    assert rows[0]["rank"]["kind"] == "derived" and rows[0]["rank"]["value"] > 2.5
    assert rows[2]["rank"]["value"] < 1.2
    assert run(["plan", "imbalance", *PAPER, "-n", "32", "--skew", "trace"]) == 0
    assert "not a recording" in capsys.readouterr().out


def test_what_takes_too_long_or_lacks_links_is_left_out_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "imbalance", "r1", "--hw", "gb200", "-n", "2048", "--ep", "2048")
    assert [row["placement"] for row in found["rows"]] == ["order", "random"]
    assert "too long to balance" in " ".join(found["notes"])
    found = answer(capsys, "imbalance", "v2-lite", "--hw", "epyc-9654", "-n", "2", "--skew", "uniform")
    assert len(found["rows"]) == 4 and found["rows"][0]["step"] is None and "no scale-up links" in found["notes"][0]


def test_pods_map_over_skew_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("pods", *PAPER, "-n", "64", "--pod", "16", "--zipf", "0", "--zipf", "0.6", "--requests", "81",
                 "--context", "2048", "--weights", "bf16")  # fmt: skip
    found = answer(capsys, *arguments)
    ratios = {row["placement"]: [each["value"] for each in row["ratio"]] for row in found["rows"]}
    assert ratios["random"][1] > ratios["random"][0]
    assert ratios["balanced, one copy a rank"][1] < ratios["random"][1]
    assert run(["plan", *arguments, "--software"]) == 0
    assert "18 % at" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("net", *PAPER), "at least two expert-parallel ranks"),
        (("imbalance", *PAPER), "at least two expert-parallel ranks"),
        (("net", "Llama-3.1-8B", "--hw", "h100", "-n", "2", "--ep", "2"), "no experts to spread"),
        (("imbalance", *PAPER, "-n", "8", "--skew", "gauss"), "there is no skew 'gauss'"),
        (("imbalance", *PAPER, "-n", "8", "--skew", "gone.npy"), "No such file"),
        (("imbalance", *PAPER, "-n", "8", "--tokens", "-1"), "not in the range"),
        (("pods", *PAPER, "-n", "100", "--pod", "32"), "pods of 32"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    assert words in fails(capsys, *arguments)


def test_counts_are_recorded_by_the_engine_and_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "counts.json"
    text.write_text("The planner reads what the engine counted. " * 40)
    assert run(["plan", "record", "--text", str(text), "--out", str(out), "--window", "64", "--tokens", "200"]) == 0
    assert "3 windows of 64 tokens, 5 MoE layers of 32 experts" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [sum(layer) for layer in written["counts"]] == [3 * 64 * 4] * 5, "tokens x K in every layer"
    rows = answer(capsys, "imbalance", "src/coterie/data/demo", "--hw", "h100", "-n", "4", "--skew", str(out))["rows"]
    assert rows[0]["rank"]["kind"] == "derived" and rows[0]["expert"]["value"] > 1
    assert "less than a window" in fails(capsys, "record", "--text", str(text), "--out", str(out), "--window", "9000")


def test_no_torch_no_engine_no_kernels() -> None:
    code = (
        "import sys; from coterie.cli.main import run; status = run(['plan', 'imbalance', 'r1', '--hw', 'h100', '-n',"
        " '8', '--json']); heavy = {'torch', 'coterie.engine', 'coterie.kernels'};"
        "sys.exit(status or ' '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
