"""Answers in the units that rows ask for, and what is said beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.planner.data import COLUMNS, Row, parse_rows, read_rows
from coterie.planner.predict import Prediction, predict


def asked(**changes: str) -> Row:
    values = dict.fromkeys(COLUMNS, "") | {
        "id": "q", "model": "DeepSeek-R1", "hardware": "H200", "n_gpus": "8", "precision": "fp8", "metric": "TPOT",
        "parallelism": "sglang TP8", "batch_or_concurrency": "64", "isl": "1024", "osl": "512", "unit": "ms",
    }  # fmt: skip
    values |= changes
    (row,) = parse_rows(",".join(COLUMNS) + "\n" + ",".join(f'"{values[name]}"' for name in COLUMNS), "test")
    return row


def value(found: Prediction) -> float:
    assert found.quantity is not None, found.reason
    return found.quantity.value


TOTAL = "output_throughput_total"
CPU = {"hardware": "Xeon 6980P", "n_gpus": "1", "parallelism": "llama.cpp", "precision": "Q4_K_M",
       "batch_or_concurrency": "1"}  # fmt: skip
DEEPEP = {"hardware": "H800", "n_gpus": "32", "parallelism": "DeepEP low-latency EP32", "metric": "dispatch_latency",
          "batch_or_concurrency": "128 tokens"}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "times"),
    [
        ({}, {"unit": "s"}, 1e-3),
        ({}, {"unit": "milliseconds"}, 1.0),
        ({}, {"unit": "µs/token"}, 1e3),
        ({}, {"unit": ""}, 1.0),
        ({}, {"unit": "", "metric": "mean_tpot_ms"}, 1.0),
        ({"metric": "TTFT"}, {"metric": "mean_ttft_s", "unit": ""}, 1e-3),
        ({"metric": TOTAL, "unit": "tok/s"}, {"metric": TOTAL, "unit": "ktok/s"}, 1e-3),
        ({"metric": TOTAL, "unit": "tok/s"}, {"metric": TOTAL, "unit": "tokens per minute"}, 60.0),
        ({"metric": TOTAL, "unit": "tok/s"}, {"metric": "request_throughput", "unit": "req/s"}, 1 / 512),
        ({"metric": TOTAL, "unit": "tok/s"}, {"metric": TOTAL, "unit": "tok/s/GPU"}, 1 / 8),
        (CPU, CPU | {"unit": "s"}, 1e-3),
        (DEEPEP | {"unit": "us"}, DEEPEP | {"unit": "ms"}, 1e-3),
        (DEEPEP | {"unit": "us"}, DEEPEP | {"unit": ""}, 1.0),
    ],
)
def test_a_unit_scales_value_and_interval(one: dict[str, str], other: dict[str, str], times: float) -> None:
    first, second = predict(asked(**one)), predict(asked(**other))
    assert value(second) == pytest.approx(value(first) * times, rel=1e-9)
    assert first.quantity is not None and second.quantity is not None
    assert second.quantity.p90 == pytest.approx(first.quantity.p90 * times, rel=1e-9)
    assert second.quantity.unit, "an answer names its unit, also where the row does not"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"unit": "tok/s"}, "is no time"),
        ({"metric": TOTAL, "unit": "ms"}, "is a time"),
        ({"metric": "request_throughput", "unit": "req/s", "osl": ""}, "how many tokens"),
    ],
)
def test_a_unit_of_something_else_is_refused(changes: dict[str, str], part: str) -> None:
    found = predict(asked(**changes))
    assert found.quantity is None and part in found.reason


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"metric": "TPOT p99"}, "the mean, not the p99"),
        ({"osl": ""}, "1024 answer tokens"),
        ({"hardware": "H100", "n_gpus": "1", "parallelism": "TP1"}, "671 GB on 1 x 86 GB: they do not fit"),
        (CPU | {"hardware": "AMD EPYC 9999X"}, "32 cores"),
    ],
)
def test_what_an_answer_takes_for_granted_is_said(changes: dict[str, str], part: str) -> None:
    assert part in "; ".join(predict(asked(**changes)).assumed)
    assert predict(asked()).assumed == ()


def test_a_cpu_is_as_uncertain_whatever_its_row_is_called() -> None:
    """The factor of an interval follows what is measured, not the form of the id."""
    rate = CPU | {"metric": "decode_throughput", "unit": "tok/s"}
    found = [predict(asked(**rate, id=name)).quantity for name in ("cpu-9", "x")]
    assert found[0] is not None and found[1] is not None and found[0].p90 == found[1].p90


def test_a_question_may_say_anything_as_its_value(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("id,model,hardware,metric,value\na,V3,H200,TPOT,n/a\nb,V3,H200,TPOT,to be measured\n")
    assert [row.value for row in read_rows(file, values=False)] == [None, None]


def test_the_source_names_the_engine_in_any_case() -> None:
    (one, other) = (predict(asked(parallelism="TP8", source=source)) for source in ("SGLang blog", "lmsys.org"))
    assert value(one) == value(other)
