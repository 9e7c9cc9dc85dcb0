"""Rows whose numbers cannot be are answered with the reason: every numeric column, alone and in pairs; other rows are
not touched."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest

from coterie.cli.main import run
from coterie.planner.data import COLUMNS, Row, number, parse_rows, shipped_rows
from coterie.planner.predict import predict
from coterie.planner.row_checks import check_row

SERVED = {
    "id": "q", "model": "DeepSeek-R1", "hardware": "H200", "n_gpus": "8", "precision": "fp8", "metric": "TPOT",
    "parallelism": "sglang TP8", "batch_or_concurrency": "64", "isl": "1024", "osl": "512", "unit": "ms",
}  # fmt: skip
FORMS = {
    "tpot": {},
    "ttft": {"metric": "TTFT"},
    "e2e": {"metric": "E2E_latency"},
    "prefill": {"metric": "prefill_throughput_per_gpu", "unit": "tok/s/GPU"},
    "output": {"metric": "output_throughput_total", "unit": "tok/s"},
    "speed": {"metric": "output_speed_per_user", "unit": "tok/s/user"},
    "apart": {"parallelism": "trtllm disagg P1x(TP1 DP4 EP4) D1x(TP1 DP8 EP8) decode bs 8", "n_gpus": "12"},
    "cpu": {"hardware": "2x Xeon 6980P", "n_gpus": "0", "parallelism": "llama.cpp", "precision": "Q8_0"},
    "exchange": {"hardware": "H800", "n_gpus": "32", "parallelism": "DeepEP low-latency EP32", "unit": "us",
                 "metric": "dispatch_latency", "batch_or_concurrency": "128 tokens/GPU"},
    "kernel": {"model": "MLA decode 128 heads", "hardware": "H800", "n_gpus": "1", "parallelism": "FlashMLA",
               "precision": "BF16", "metric": "kernel_latency", "unit": "us"},
    "imbalance": {"hardware": "GB200", "n_gpus": "32", "parallelism": "EP32 8 slots/rank, no EPLB", "unit": "",
                  "metric": "rank_load_max_over_mean", "batch_or_concurrency": "256/GPU"},
}  # fmt: skip
NUMERIC = ("n_gpus", "batch_or_concurrency", "isl", "osl")
IMPOSSIBLE = ("-4", "-0.5", "nan", "NaN", "inf", "-inf", "1e30", "1e999", "99999999999999999999", "seven", "0.3")
SPLIT = {"tpot": {"osl"}, "e2e": {"isl", "osl"}, "ttft": {"isl", "osl"}, "prefill": {"isl"}, "output": {"osl"},
         "speed": {"osl"}, "apart": {"osl"}, "cpu": {"osl"}}  # fmt: skip
"""Columns of tokens in which 0 is impossible for what is asked."""


def row(**changes: str) -> Row:
    values = dict.fromkeys(COLUMNS, "") | SERVED | changes
    (one,) = parse_rows(",".join(COLUMNS) + "\n" + ",".join(f'"{values[name]}"' for name in COLUMNS), "test")
    return one


@pytest.mark.parametrize("form", FORMS)
def test_every_form_answers_as_it_stands(form: str) -> None:
    found = predict(row(**FORMS[form]))
    assert found.quantity is not None, found.reason


@pytest.mark.parametrize("column", NUMERIC)
@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_cannot_be_is_refused_and_named(form: str, column: str) -> None:
    for text in IMPOSSIBLE:
        found = predict(row(**FORMS[form] | {column: text}))
        assert found.quantity is None and column in found.reason and "\n" not in found.reason, (text, found)


@pytest.mark.parametrize("form", FORMS)
def test_zero_is_refused_where_there_must_be_some(form: str) -> None:
    columns = {"batch_or_concurrency"} | SPLIT.get(form, set()) | (set() if form == "cpu" else {"n_gpus"})
    for column in columns:
        for text in ("0", "0.0", "00"):
            found = predict(row(**FORMS[form] | {column: text}))
            assert found.quantity is None and column in found.reason, (column, text, found)


def test_pairs_of_odd_columns_leave_other_rows_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(20261130)
    rows, bad = [], []
    for index in range(150):
        form = draw.choice(list(FORMS))
        odd = {column: draw.choice(IMPOSSIBLE) for column in draw.sample(NUMERIC, 2)}
        bad.append(f"bad-{index}")
        rows.append(SERVED | FORMS[form] | odd | {"id": bad[-1]})
        rows.append(SERVED | {"id": f"good-{index}"})
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert run(["plan", "predict", "--data", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    answers = {each["id"]: each for each in json.loads(captured.out)}
    assert "Traceback" not in captured.out + captured.err
    assert all(answers[name]["value"] is None and answers[name]["reason"] for name in bad)
    expected = predict(row()).quantity
    assert expected is not None
    assert {answers[f"good-{index}"]["value"] for index in range(150)} == {expected.value}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"parallelism": "sglang TP0"}, "degree"),
        ({"parallelism": "sglang TP -8"}, "negative degree"),
        ({"parallelism": "sglang DP1e30"}, "degree"),
        ({"parallelism": "trtllm disagg P0x(TP1 DP4 EP4) D1x(TP1 DP8 EP8)"}, "pools"),
        ({"parallelism": "trtllm disagg P1x(TP1 DP4 EP4) D1x(TP1 DP8 EP8) decode bs 0"}, "batch"),
        ({"parallelism": "sglang TP8 MTP1 (0 tokens/step)"}, "tokens a step"),
        ({"parallelism": "sglang TP8 MTP1 (140% acceptance)"}, "accepted drafts"),
        ({"metric": "decode_throughput", "unit": "tok/s", "parallelism": "TP8, TPOT<0ms"}, "limit"),
        ({"metric": "prefill_throughput_incl_hits", "unit": "tok/s (100% of input hit)"}, "found in a cache"),
        ({"hardware": "0x H200"}, "0 x H200"),
        ({"hardware": "2x Xeon 6454S (0ch DDR5-4800)", "parallelism": "llama.cpp"}, "channels"),
        ({"hardware": "2x Xeon 6454S", "parallelism": "llama.cpp 0 threads"}, "threads"),
        ({"n_gpus": "2.5"}, "whole number"),
        ({"osl": "1"}, "two tokens"),
        ({"n_gpus": "eight"}, "no number"),
        ({"batch_or_concurrency": "batch -4"}, "negative"),
        ({"isl": "- 1"}, "negative"),
    ],
)
def test_degrees_and_rates_that_cannot_be_are_refused(changes: dict[str, str], part: str) -> None:
    found = predict(row(**changes))
    assert found.quantity is None and part in found.reason and "\n" not in found.reason


@pytest.mark.parametrize("text", ["", "n/a", "none", "?", "64", "64.0", "~64", "<=64", "64 concurrent", "1e2", "1,024",
                                  "128-256", "max load (offline)", "production mix"])  # fmt: skip
def test_texts_that_mean_something_are_answered(text: str) -> None:
    assert predict(row(batch_or_concurrency=text)).quantity is not None


def test_every_published_row_passes() -> None:
    for each in shipped_rows():
        check_row(each)


def test_numbers_in_texts() -> None:
    texts = ("1e3", "8k", ".5", "1,024", "1e999", "x")
    assert [number(text) for text in texts] == [1000, 8192, 0.5, 1024, float("inf"), None]
