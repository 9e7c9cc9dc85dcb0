"""Refuses rows whose numbers cannot be: negative, not finite, zero where nothing is answered, or beyond any machine.

Columns hold text as published ("~1088 concurrent", "avg 188", "production mix"), so a number is looked for in it; words
alone pass only where they say how a figure was made. The free text of a row is checked for degrees and rates that
would divide by nothing. Not here: what the texts mean (`phrases`), units (`row_units`), models and devices (`named`).
"""

from __future__ import annotations

import re

from coterie.planner.data import Row, number
from coterie.planner.phrases import parts_of
from coterie.spec.errors import SpecError

_BLANK = ("", "none", "null", "?", "n/a", "na", "-", "tbd", "unknown")
_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("n_gpus", "devices", 1e6, r"(?!)"),
    ("batch_or_concurrency", "load", 1e8, r"max|full|offline|saturat|production|mix|peak"),
    ("isl", "isl", 1e8, r"mix|average|set\b|trace|sharegpt|production|vari|random"),
    ("osl", "osl", 1e8, r"mix|average|set\b|trace|sharegpt|production|vari|random"),
)
"""Column, field of a row, largest number, and words that may stand without a number. A million devices and a hundred
million requests or tokens are ten times what anybody has published."""
_NEGATIVE = r"^\s*[-−–]\s*[\d.]|[\s=(:<>≈~,][-−–][\d.]"
_NOT_FINITE = r"\b(nan|[+-]?inf|infinity)\b"
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)"
_IN_TEXT: tuple[tuple[str, float, float, str], ...] = (
    (rf"(?<![A-Za-z])(?:moe)?(?:TP|DP|DEP|EP|PP|DPattn)[ =]*{_NUMBER}", 1, 1e5, "a parallel degree"),
    (rf"\b[PD]\s*{_NUMBER}\s*x\s*\(", 1, 1e5, "a number of pools"),
    (rf"\bbs\s*{_NUMBER}", 1, 1e8, "a batch"),
    (rf"{_NUMBER}\s*threads", 1, 1e5, "a number of threads"),
    (rf"{_NUMBER}\s*% of input hit", 0, 99.9, "the share of prompts found in a cache"),
    (rf"{_NUMBER}\s*%\s*accept", 0, 100, "the share of accepted drafts"),
    (rf"{_NUMBER}\s*tokens?\s*/\s*step", 1, 100, "tokens a step"),
    (rf"(?:MTP|eagle|nextn)[-_ ]?{_NUMBER}", 0, 64, "a number of drafted tokens"),
    (rf"{_NUMBER}\s*tok/s/user", 1e-3, 1e6, "a user's speed"),
    (rf"(?:TPOT|ITL)\s*(?:<=?|≤|under|at)\s*{_NUMBER}", 1e-3, 1e7, "a limit of a token's time"),
    (rf"{_NUMBER}\s*ch(?:annels)?\b", 1, 64, "a number of memory channels"),
    (rf"(?:DDR\d|MRDIMM)-{_NUMBER}", 100, 1e5, "a memory's rate"),
    (rf"\b[mknh]{_NUMBER}\b", 1, 1e8, "a size"),
    (rf"\btop-?{_NUMBER}\b", 1, 1e4, "experts a token"),
)
"""Pattern, least and largest number, and what it is."""
_NEGATIVE_DEGREE = r"(?<![A-Za-z])(?:moe)?(?:TP|DP|DEP|EP|PP)(?:\s+|\s*=\s*)[-−]\s*\d"
_ANSWERS = ("tpot", "ttft", "e2e", "decode", "output", "total", "speed")
_PROMPTS = ("ttft", "e2e", "prefill", "total")


def check_row(row: Row) -> None:
    """Raise SpecError that names the first column whose number cannot be."""
    for column, name, most, words in _COLUMNS:
        _check_column(row, column, getattr(row, name), (most, words))
    _check_tokens(row)
    hosts, others = parts_of(row.hardware)
    for count, name in (*hosts, *others):
        if not 1 <= count <= 1e6:
            raise SpecError(f"hardware of row {row.id} has {count} x {name}; from 1 to 1e6 are possible")
    if number(row.devices) == 0 and not hosts:
        raise SpecError(f"n_gpus of row {row.id} must be above 0, or blank if it is not known")
    text = f"{row.parallelism} | {row.hardware} | {row.model} | {row.metric} | {row.unit}"
    if re.search(_NEGATIVE_DEGREE, text):
        raise SpecError(f"parallelism of row {row.id} has a negative degree: {row.parallelism!r}")
    for pattern, least, most, what in _IN_TEXT:
        for found in re.finditer(pattern, text, re.I):
            if not least <= float(found[1]) <= most:
                raise SpecError(f"row {row.id}: {what} must be from {least:g} to {most:g}, but it says {found[0]!r}")


def _check_column(row: Row, column: str, text: str, limits: tuple[float, str]) -> None:
    """One of the columns of numbers: largest value, and words that may stand alone."""
    plain = text.strip().lower()
    if plain in _BLANK:
        return
    most, words = limits
    if re.search(_NEGATIVE, plain):
        raise SpecError(f"{column} of row {row.id} must not be negative, but is {text!r}")
    value = number(plain)
    if re.search(_NOT_FINITE, plain) or (value is None and not re.search(words, plain)):
        raise SpecError(f"{column} of row {row.id} is no number: {text!r}; leave it blank if it is not known")
    if value is None:
        return
    if value > most:
        raise SpecError(f"{column} of row {row.id} must be at most {most:g}, but is {text!r}")
    if column == "batch_or_concurrency" and value == 0:
        raise SpecError(f"{column} of row {row.id} must be above 0, or blank if it is not known")
    if 0 < value < 1:
        raise SpecError(f"{column} of row {row.id} must be at least 1, but is {text!r}")
    if column == "n_gpus" and value != int(value):
        raise SpecError(f"n_gpus of row {row.id} must be a whole number, but is {text!r}")


def _check_tokens(row: Row) -> None:
    """A phase that was not run has 0 tokens; one that is asked about has some, and a time between tokens needs two."""
    prompt, answer = number(row.isl), number(row.osl)
    if prompt == 0 and row.quantity in _PROMPTS:
        raise SpecError(f"isl of row {row.id} must be above 0 for {row.metric}")
    if answer == 0 and row.quantity in _ANSWERS:
        raise SpecError(f"osl of row {row.id} must be above 0 for {row.metric}")
    if answer == 1 and row.quantity == "tpot":
        raise SpecError(f"osl of row {row.id} is 1, but {row.metric} is a time between two tokens")
