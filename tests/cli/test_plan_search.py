"""`coterie plan search` and `plan serve`: tables, files that they write, limits that cannot be kept, mistakes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from coterie.cli.main import run

SEARCH = ["search", "r1", "--hw", "b200", "-n", "8", "--tpot", "50", "--ttft", "2000"]
TRACED = ["serve", "r1", "--hw", "b200", "-n", "8", "--trace"]
SERVE = ["serve", "r1", "--hw", "b200", "-n", "8", "--osl", "64", "--requests", "60"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_the_table_of_sizes_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *SEARCH, "--also", "32").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["8", "32"]


def test_layout_options_hold_for_what_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, *SEARCH, "--tp", "8", "--json"))["searches"][0]
    assert {each["layout"]["tp"]["value"] for each in found["front"]} == {8}


class Links(HTMLParser):
    """Whatever a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.found += [tag] if tag in ("script", "link", "iframe", "img", "object", "embed") else []


def test_the_report_is_one_file_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    shown(capsys, *SEARCH, "--report", str(file))
    text = file.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert not links.found and "url(" not in text and "@import" not in text
    assert text.count("<svg") == 3 and 'class="best"' in text and "sglang.launch_server" in text
    numbers = re.search(r"<pre>(\{.*\})</pre></details>", text, re.S)
    assert numbers is not None


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_written(ending: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"front.{ending}"
    shown(capsys, *SEARCH, "--plot", str(file))
    assert file.read_bytes().startswith(start)


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = error(capsys, *SEARCH, "--plot", str(tmp_path / "front.png"))
    assert "pip install 'coterie[plot]'" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SEARCH, "--plot", "front.gif"], "written as .png or .svg, not .gif"),
        ([*SEARCH, "--skew", "zapf"], "there is no skew 'zapf'"),
        (["search", "r1", "--hw", "h100", "-n", "4"], "does not fit on 4 x H100"),
        (["search", "r1", "--hw", "b200", "-n", "8", "--tpot", "-3"], "is not in the range"),
        ([*SEARCH, "--hit", "1"], "is not in the range"),
        ([*SEARCH, "--batch", "8"], "leave --batch out"),
        ([*SEARCH, "--engine", "none-such"], "there are no measurements of an engine 'none-such'"),
        (["serve", "r1", "--hw", "b200", "-n", "8"], "say --rate, or --ttft or --tpot"),
        (["serve", "r1", "--hw", "b200", "-n", "2", "--rate", "1"], "nothing is left for the cache"),
        (["serve", "r1", "--hw", "b200", "-n", "8", "--tpot", "1"], "a step of one stream a rank takes"),
        (["serve", "r1", "--hw", "b200", "-n", "8", "--ttft", "1"], "computing the prompt alone takes"),
        ([*SERVE, "--rate", "0"], "is not in the range"),
        ([*TRACED, "missing.jsonl"], "No such file"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error(capsys, *arguments)


def test_an_slo_that_nothing_keeps_says_so_and_which_term(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "search", "r1", "--hw", "b200", "-n", "8", "--tpot", "1")
    assert "no layout reaches 1 ms a token" in text and "alone is" in text


def test_serve_shows_percentiles_pools_and_the_largest_rate(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *SERVE, "--tpot", "60", "--prefill-instances", "1")
    assert "load of the pools: prompts" in text and "largest rate with 90 % within the limits" in text


def test_a_trace_is_served_at_its_own_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"arrival": i / 2, "isl": 100 + i, "osl": 20} for i in range(50)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = json.loads(shown(capsys, *TRACED, str(file), "--json"))
    assert found["asked"]["rate"] == pytest.approx(50 / 24.5) and not found["simulated"]["saturated"]
    assert found["simulated"]["requests"]["value"] == 40  # the first and the last tenth are not counted


def trace_of(folder: Path, *rows: dict[str, object]) -> str:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_a_trace_says_how_long_requests_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What follows from lengths (places of a rank, the closed form) follows from the trace's, not from the flags'."""
    file = trace_of(tmp_path, *({"arrival": i, "isl": 150 + i % 100, "osl": 40, "cached": 50} for i in range(100)))
    found = json.loads(shown(capsys, *TRACED, file, "--json"))
    assert (found["asked"]["isl"], found["asked"]["osl"]) == (200, 40)
    assert found["asked"]["hit"] == pytest.approx(50 / 199.5)
    drawn = json.loads(shown(capsys, "serve", "r1", "--hw", "b200", "-n", "8", "--isl", "200", "--osl", "40", "--hit",
                             "0.25", "--rate", str(100 / 99), "--json"))  # fmt: skip
    for name in ("tpot", "ttft"):
        same = drawn["closed_form"][name]["value"]
        assert found["closed_form"][name]["value"] == pytest.approx(same, rel=0.01)
    assert "200 + 40 tokens; a rank: 1024 requests" in shown(capsys, *TRACED, file)


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([{"arrival": 0, "isl": 9, "osl": 3}], [], "say --rate"),
        ([{"arrival": 0, "isl": 9, "osl": 3}], ["--isl", "9"], "--isl would change nothing"),
        ([{"arrival": 0, "isl": 9}], [], "has no 'osl'"),
        ([{"arrival": 0, "isl": 9.5, "osl": 3}], [], "isl is 9.5, no whole number"),
        ([{"arrival": 0, "isl": True, "osl": 3}], [], "isl is True, no whole number"),
        ([{"arrival": 0, "isl": float("inf"), "osl": 3}], [], "isl is inf, no whole number"),
        ([{"arrival": float("nan"), "isl": 9, "osl": 3}], [], "a time or a length that cannot be"),
        ([{"arrival": 0, "isl": 10**400, "osl": 3}], [], "is not an object with arrival, isl and osl"),
        ([], [], "has no requests"),
    ],
)
def test_bad_traces_are_one_line(
    rows: list[dict[str, object]], more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error(capsys, *TRACED, trace_of(tmp_path, *rows), *more)


def test_a_trace_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.gz").write_bytes(b"\x1f\x8b\x08\x00")
    assert "is no text" in error(capsys, *TRACED, str(tmp_path / "trace.gz"))


def shares(value: object) -> Iterator[dict[str, float]]:
    """Quantities that are parts of a whole."""
    if isinstance(value, dict):
        if value.get("formula") in ("goodput", "prompt-share") and value["unit"] == "":
            yield value
        for item in value.values():
            yield from shares(item)
    elif isinstance(value, list):
        for item in value:
            yield from shares(item)


@pytest.mark.parametrize("arguments", [SEARCH, [*SERVE, "--rate", "4", "--tpot", "60"]])
def test_no_interval_of_a_share_goes_beyond_one(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = list(shares(json.loads(shown(capsys, *arguments, "--json"))))
    assert found and all(each["p90"] <= 1 for each in found)


def test_what_was_asked_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["--skew", "zipf:0.4", "--placement", "balanced", "--tp", "8", "--chunk", "4096", "--price", "2"]
    asked = json.loads(shown(capsys, *SEARCH, *question, "--json"))["asked"]
    assert (asked["skew"], asked["placement"], asked["fixed"]) == ("zipf:0.4", "balanced", {"tp": 8})
    assert (asked["chunk"], asked["price"], asked["slo"]) == (4096, 2, {"ttft": 2.0, "tpot": 0.05})
