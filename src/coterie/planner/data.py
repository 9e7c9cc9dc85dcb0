"""Published measurements as rows: the table that ships with the package, or one in the same columns.

`rows` reads a CSV file; a blank value is a question. `Row.quantity` says what is asked: times, throughputs, an
all-to-all, a kernel, an imbalance, a simulated limit. What the free text of a row means (engine, parallel degrees,
pools, load) is read by `planner/phrases.py`; what it should be is answered by `planner/predict.py`. Not here: fitting.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from coterie.spec.errors import SpecError

COLUMNS = (
    "id", "model", "hardware", "n_gpus", "parallelism", "precision", "batch_or_concurrency", "isl", "osl", "metric",
    "value", "unit", "source",
)  # fmt: skip
_FIELDS = (
    "id", "model", "hardware", "devices", "parallelism", "precision", "load", "isl", "osl", "metric", "value", "unit",
    "source",
)  # fmt: skip
"""Fields of a row, in the order of its columns."""
_NEEDED = ("id", "model", "hardware", "metric")

Quantity = Literal[
    "tpot", "ttft", "prefill", "decode", "output", "total", "speed", "e2e", "dispatch", "combine", "dispatch-bandwidth",
    "combine-bandwidth", "kernel", "rate", "rank-imbalance", "expert-imbalance", "a2a", "capacity", "gamma-ratio",
    "unknown",
]  # fmt: skip
"""prefill, decode: tokens a second of that phase; output: generated tokens a second; total: prompt tokens as well;
speed: tokens a second that one user sees; a2a, capacity, gamma-ratio: what the reference paper simulated."""
Per = Literal["all", "gpu", "node", "user"]
KINDS = ("tpot", "ttft", "svc", "thr", "cpu", "a2a", "kern", "imb", "sim")
"""Kinds that are scored apart; `ix-agg-tpot` and `ix-pd-tpot` are both tpot."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, or a question if `value` is None. Texts are as published."""

    id: str
    model: str
    hardware: str
    devices: str
    parallelism: str
    precision: str
    load: str
    isl: str
    osl: str
    metric: str
    value: float | None
    unit: str
    source: str

    @property
    def quantity(self) -> Quantity:
        return quantity_of(self.metric)

    @property
    def kind(self) -> str:
        """One of KINDS: from the id where it says, from the metric otherwise."""
        prefix = self.id.split("-")[0].lower()
        if prefix in KINDS and prefix not in ("tpot", "ttft"):
            return prefix
        quantity = self.quantity
        if quantity in ("tpot", "ttft"):
            return quantity
        if quantity in ("dispatch", "combine", "dispatch-bandwidth", "combine-bandwidth"):
            return "a2a"
        if quantity in ("kernel", "rate"):
            return "kern"
        if quantity in ("rank-imbalance", "expert-imbalance"):
            return "imb"
        return "sim" if quantity in ("a2a", "capacity", "gamma-ratio") else "svc"

    @property
    def per(self) -> Per:
        """Whom a throughput counts for."""
        text = f"{self.metric} {self.unit}".lower()
        if "per_user" in text or "/user" in text:
            return "user"
        if re.search(r"per_[gnx]pu|/[gn]pu|per_chip|/chip|per_device", text):
            return "gpu"
        return "node" if "per_node" in text or "/node" in text else "all"

    @property
    def suspect(self) -> bool:
        """Marked by who collected it as not to be scored, or only a bound."""
        text = f"{self.unit} {self.metric}".lower()
        return "suspect" in text or "do not score" in text or "lower bound" in text


_QUANTITIES: tuple[tuple[str, Quantity], ...] = (
    (r"gamma.*ratio|ratio of gamma", "gamma-ratio"),
    (r"b_?cap", "capacity"),
    (r"a2a.*(simulated)|simulated.*a2a", "a2a"),
    (r"expert.*(max_over_mean|imbalance)", "expert-imbalance"),
    (r"(rank|gpu|device).*(max_over_mean|imbalance)|max_over_mean", "rank-imbalance"),
    (r"dispatch.*bandwidth", "dispatch-bandwidth"),
    (r"combine.*bandwidth", "combine-bandwidth"),
    (r"dispatch", "dispatch"),
    (r"combine", "combine"),
    (r"kernel|gemm.*latency", "kernel"),
    (r"achieved|tflops", "rate"),
    (r"e2e|end.to.end|request_latency", "e2e"),
    (r"ttft|time_to_first|first_token", "ttft"),
    (r"tpot|itl|inter.token|time_per_output", "tpot"),
    (r"speed|per_user", "speed"),
    (r"prefill|prompt_(throughput|processing)|^pp", "prefill"),
    (r"total_(token_)?throughput", "total"),
    (r"req(uest)?s?_?(throughput|rate|/s|_per_s)|\bqps\b|\brps\b", "output"),
    (r"decode|generation|^tg", "decode"),
    (r"throughput|tok/s", "output"),
)  # fmt: skip


def quantity_of(metric: str) -> Quantity:
    """What a metric's name asks for."""
    text = metric.lower()
    for pattern, quantity in _QUANTITIES:
        if re.search(pattern, text):
            return quantity
    return "unknown"


def number(text: str) -> float | None:
    """The first number of a text such as "8192", "~1088 concurrent", "ShareGPT avg 301", "1,024", "8k", "1e3"."""
    found = re.search(r"((?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+\b)?)\s*([kK]\b)?", text)
    if found is None:
        return None
    value = float(found[1].replace(",", ""))
    return value * 1024 if found[2] else value


_BLANK = ("", "nan", "none", "null", "?", "n/a", "na", "-", "tbd", "unknown")


def _value(text: str, row_id: str) -> float | None:
    stripped = text.strip()
    if stripped.lower() in _BLANK:
        return None
    try:
        value = float(stripped)
    except ValueError:
        raise SpecError(f"the value of row {row_id} is no number: {stripped!r}") from None
    if not math.isfinite(value) or value <= 0:
        raise SpecError(f"the value of row {row_id} must be above 0, not {stripped}")
    return value


def parse_rows(text: str, name: str, *, values: bool = True) -> tuple[Row, ...]:
    """Rows of a CSV text with a header; columns may stand in any order and may lack unless needed. Without `values`
    every row is a question, whatever its value says."""
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")))
    header = [column.strip() for column in reader.fieldnames or ()]
    missing = [column for column in _NEEDED if column not in header]
    if missing:
        raise SpecError(f"{name} lacks the columns {', '.join(missing)}; a table has {', '.join(COLUMNS)}")
    found = []
    for record in reader:
        clean = {(key or "").strip(): (value or "").strip() for key, value in record.items() if isinstance(value, str)}
        cells = {name: clean.get(column, "") for name, column in zip(_FIELDS, COLUMNS, strict=True)}
        if not any(cells.values()):
            continue
        row_id = cells.pop("id") or f"row-{reader.line_num}"
        text = cells.pop("value")
        value = _value(text, row_id) if values else None
        found.append(Row(id=row_id, value=value, **cells))
    return tuple(found)


def read_rows(path: str | Path, *, values: bool = True) -> tuple[Row, ...]:
    """Rows of a CSV file. Raises SpecError for a file that is no such table."""
    try:
        return parse_rows(Path(path).read_text(encoding="utf-8"), str(path), values=values)
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path} is no CSV table: {error}") from error


def shipped_rows() -> tuple[Row, ...]:
    """The measurements that the fit has seen."""
    file = resources.files("coterie") / "data" / "planner" / "measurements.csv"
    return parse_rows(file.read_text(encoding="utf-8"), "measurements.csv")
