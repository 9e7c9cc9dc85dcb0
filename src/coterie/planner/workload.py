"""Workload: which requests arrive when, and the service level they are owed; drawn, or read from a trace.

Lengths are log-normal around their means, arrivals a renewal process with gamma gaps (spread 1: Poisson), all from one
seed: the same unit gaps are stretched for every rate, so that rates are compared on the same requests. Not here: what
the requests meet (`simulate`), what is reported of it (`goodput`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import SpecError

MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level: seconds to the first token, seconds per output token ((end - first) / (tokens - 1)), and the share
    of requests that must meet both. Infinite: not asked for."""

    ttft: float = math.inf
    tpot: float = math.inf
    attain: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            if not getattr(self, name) > 0:
                raise SpecError(f"the SLO's {name} must be above 0 seconds, not {getattr(self, name)}")
        if not 0 < self.attain <= 1:
            raise SpecError(f"the share of requests within the SLO must be above 0 and at most 1, not {self.attain}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`rate`: requests a second that arrive at the whole deployment. `isl`, `osl`: mean tokens of prompt and answer.
    `spread_*`: coefficients of variation of lengths (0: all alike) and of the gaps between arrivals (1: Poisson).
    `hit`: share of each prompt that is found in the prefix cache. Raises SpecError for sizes that cannot be."""

    rate: float
    isl: int
    osl: int
    spread_isl: float = 0.0
    spread_osl: float = 0.0
    spread_gaps: float = 1.0
    hit: float = 0.0
    requests: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1e9:
            raise SpecError(f"the rate must be above 0 and below 1e9 requests a second, not {self.rate}")
        for name in ("isl", "osl"):
            if not 1 <= getattr(self, name) <= MAX_TOKENS:
                raise SpecError(f"{name} must be from 1 to {MAX_TOKENS} tokens, not {getattr(self, name)}")
        for name in ("spread_isl", "spread_osl", "spread_gaps"):
            if not 0 <= getattr(self, name) <= 10:
                raise SpecError(f"{name} must be from 0 to 10, not {getattr(self, name)}")
        if not 0 <= self.hit < 1:
            raise SpecError(f"the share of prompts found in the prefix cache must be from 0 to below 1, not {self.hit}")
        if not 1 <= self.requests <= 1_000_000:
            raise SpecError(f"the number of requests must be from 1 to 1,000,000, not {self.requests}")


@dataclass(frozen=True, slots=True)
class Requests:
    """Arrays of N requests in order of arrival: `arrival` [N] in seconds; `isl`, `osl` [N] tokens; `cached` [N] prompt
    tokens that need no computing (all of them: the prompt came with its cache rows and its first token)."""

    arrival: NDArray[np.float64]
    isl: NDArray[np.int64]
    osl: NDArray[np.int64]
    cached: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival)

    def at_rate(self, rate: float) -> Requests:
        """The same requests, arriving at another mean rate per second."""
        span = float(self.arrival[-1]) or 1.0
        return replace(self, arrival=self.arrival * (len(self) / rate / span))


def draw(load: Workload) -> Requests:
    """Draw the requests of a workload."""
    random = np.random.default_rng(load.seed)
    count = load.requests
    if load.spread_gaps > 0:
        shape = load.spread_gaps**-2
        gaps = random.gamma(shape, 1 / shape, count)
    else:
        gaps = np.ones(count)
    isl = _lengths(random, load.isl, load.spread_isl, count)
    osl = _lengths(random, load.osl, load.spread_osl, count)
    cached = np.minimum((isl * load.hit).astype(np.int64), isl - 1)
    return Requests(np.cumsum(gaps) / load.rate, isl, osl, cached)


def _lengths(random: np.random.Generator, mean: int, spread: float, count: int) -> NDArray[np.int64]:
    """Whole numbers from 1, log-normal with that mean and coefficient of variation."""
    if not spread:
        return np.full(count, mean, np.int64)
    sigma = math.sqrt(math.log1p(spread * spread))
    values = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
    return np.clip(np.rint(values), 1, MAX_TOKENS).astype(np.int64)


def read_trace(file: str | Path) -> Requests:
    """Read JSON lines with `arrival` (seconds), `isl`, `osl` and, if known, `cached` (found in the prefix cache).

    Raises SpecError with the line that cannot be read, OSError if the file cannot.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is no text in UTF-8: {error.reason} at byte {error.start}; give JSON lines") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            isl, osl = _whole(row, "isl"), _whole(row, "osl")
            cached = _whole(row, "cached") if row.get("cached") is not None else 0
            arrival = float(row["arrival"])
        except KeyError as error:
            raise SpecError(f"line {number} of {file} has no {error}; needed are arrival, isl and osl") from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SpecError(f"line {number} of {file} is not an object with arrival, isl and osl: {error}") from None
        lengths = 1 <= isl <= MAX_TOKENS and 1 <= osl <= MAX_TOKENS and 0 <= cached <= MAX_TOKENS
        if not (0 <= arrival < 1e12 and lengths):
            raise SpecError(f"line {number} of {file} has a time or a length that cannot be: {line.strip()[:100]}")
        rows.append((arrival, isl, osl, min(cached, isl - 1)))
    if not rows:
        raise SpecError(f"{file} has no requests; give JSON lines with arrival, isl and osl")
    rows.sort()
    arrivals, isl_all, osl_all, hits = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrivals - arrivals[0], isl_all, osl_all, hits)


def _whole(row: Any, name: str) -> int:
    """A whole number of a line. Raises ValueError for a fraction, NaN, infinity or true."""
    number = float("nan") if isinstance(row[name], bool) else float(row[name])
    if not math.isfinite(number) or number != int(number):
        raise ValueError(f"{name} is {row[name]!r}, no whole number")
    return int(number)
