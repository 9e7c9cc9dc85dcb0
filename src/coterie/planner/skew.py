"""Skew: how unevenly a router uses its experts, as a text, and samples of what a batch then asks for.

"uniform", "zipf:S" or "zipf:S,Q" (weights 1 / (i + Q)^S), "dirichlet:A", "trace" (shipped), or a file of counts
[layers, experts]. A model routes top-k without replacement, so weights are not loads: `inclusion` turns weights into
the share of tokens that choose each expert (at most 1, their sum k), exactly; counts are such shares already. Drift
("...@D"): from step to step each expert's share is multiplied by a lognormal factor of width D, as texts change; a
placement made for the mean does not know it. Drawing a batch: exponential clocks (the same as Gumbel top-k) for small
batches, and for large ones the law they approach.
Not here: ranks and placements (`imbalance`).
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import SpecError

Floats = NDArray[np.float64]
FORMS = (
    "uniform, zipf:S, zipf:S,Q, dirichlet:A, trace, or a file of counts [layers, experts] (.npy, .json, .csv); with @D "
    "behind for drift"
)
MOST_DRIFT, MOST_COUNT = 10.0, 1e15
_POINTS = 160
"""Points of the integral in `inclusion`: its sum is k within 2e-4 then, and is scaled to k."""
_SMALL = 1 << 14
"""Clocks (tokens x experts) of a batch that is drawn exactly; larger ones take their limit."""


@dataclass(frozen=True, slots=True)
class Skew:
    """`value`: S or A; `shift`: Q; `drift`: D; `counts`: float64 bytes of `shape` (layers, experts). `source`: whence.

    A value, so that results are cached by it. `seed`: of all that is drawn with it.
    """

    kind: Literal["uniform", "zipf", "dirichlet", "counts", "trace"]
    value: float = 0.0
    shift: float = 0.0
    drift: float = 0.0
    counts: bytes = b""
    shape: tuple[int, int] = (0, 0)
    source: str = ""
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Skew:
        """Read a skew from a command line. Raises SpecError for what is none of FORMS, or a bad file."""
        plain, at, width = text.rpartition("@")
        if at and not Path(text).exists():
            drift = _numbers(text, width, 1)[0]
            if drift > MOST_DRIFT:
                raise SpecError(f"the drift of {text!r} must be from 0 to {MOST_DRIFT:g}")
            return replace(cls.parse(plain, seed), drift=drift, source=text)
        name, _, rest = text.partition(":")
        if text in ("uniform", "trace"):
            return cls("uniform" if text == "uniform" else "trace", source=text, seed=seed)
        if name in ("zipf", "dirichlet"):
            numbers = _numbers(text, rest, 2 if name == "zipf" else 1)
            if name == "dirichlet":
                if numbers[0] < 1e-3:
                    raise SpecError(f"the concentration of {text!r} must be at least 0.001")
                return cls("dirichlet", numbers[0], source=text, seed=seed)
            return cls("zipf", numbers[0], numbers[1] if len(numbers) > 1 else 0.0, source=text, seed=seed)
        path = Path(text)
        if path.suffix.lower() not in (".npy", ".json", ".csv"):
            raise SpecError(f"there is no skew {text!r}; possible are {FORMS}")
        counts, drift = read_counts(path)
        return replace(cls.of_counts(counts, text, seed), drift=drift)

    @classmethod
    def of_counts(cls, counts: NDArray[Any], source: str = "counts", seed: int = 0) -> Skew:
        """Tokens of each (layer, expert) [L, E]; layers without any token are left out."""
        counts = np.asarray(counts, np.float64)
        counts = counts[None] if counts.ndim == 1 else counts
        if counts.ndim != 2 or not counts.size or not ((counts >= 0) & (counts <= MOST_COUNT)).all():
            what = f"a table {list(counts.shape)}" if counts.ndim != 2 or not counts.size else "other numbers"
            raise SpecError(f"{source} must hold numbers from 0 to {MOST_COUNT:g} [layers, experts], not {what}")
        counts = counts[counts.sum(1) > 0]
        if not len(counts):
            raise SpecError(f"{source} holds no token in any layer")
        shape = (len(counts), counts.shape[1])
        return cls("counts", counts=np.ascontiguousarray(counts).tobytes(), shape=shape, source=source, seed=seed)

    def resolve(self, experts: int) -> Skew:
        """The skew that "trace" stands for with so many experts: counts measured with them, or the fitted curve."""
        if self.kind != "trace":
            return self
        shipped = shipped_traces()
        for trace in shipped["measured"]:
            counts = np.array(trace["counts"], np.float64)
            if counts.shape[1] == experts:
                drift = self.drift or trace["drift"]
                return replace(Skew.of_counts(counts, trace["source"], self.seed), drift=drift)
        fitted = shipped["fitted"]
        drift = self.drift or fitted["drift"]
        return Skew("zipf", fitted["s"], fitted["q"], drift, source=fitted["source"], seed=self.seed)

    def shares(self, experts: int, top_k: int, layers: int) -> Floats:
        """Share of tokens that choose each expert [L, E], rows sum to `top_k`.

        "uniform" and "zipf" give one layer, the most used expert first; "dirichlet" gives `layers`. Raises SpecError
        for counts of another number of experts.
        """
        if not 1 <= top_k <= experts:
            raise SpecError(f"top-k {top_k} of {experts} experts cannot be")
        skew = self.resolve(experts)
        if skew.kind == "counts":
            if skew.shape[1] != experts:
                raise SpecError(f"{skew.source} counts {skew.shape[1]} experts, the model has {experts}")
            return capped(np.frombuffer(skew.counts).reshape(skew.shape), top_k)
        if skew.kind == "dirichlet":
            weights = np.random.default_rng(skew.seed).gamma(skew.value, size=(layers, experts))
            return inclusion(np.maximum(weights, 1e-12), top_k)
        place = np.arange(1, experts + 1) * (256 / experts if skew.shift else 1.0)
        return inclusion(np.asarray((place + skew.shift)[None] ** -skew.value, np.float64), top_k)


def _numbers(text: str, rest: str, most: int) -> list[float]:
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= most or not all(0 <= number <= 100 for number in numbers):
        raise SpecError(f"{text!r} needs {'a number' if most == 1 else 'one or two numbers'} from 0 to 100; as {FORMS}")
    return numbers


def read_counts(path: Path) -> tuple[Floats, float]:
    """Counts [layers, experts] and drift (0 where none is said) of a .npy, a .csv, or a .json: a list of lists, or an
    object with "counts" and perhaps "drift", as `coterie plan record` writes it."""
    drift = 0.0
    try:
        if path.suffix.lower() == ".npy":
            loaded = np.load(path, allow_pickle=False)
            if np.iscomplexobj(loaded):
                raise ValueError("its numbers are complex")
            return np.asarray(loaded, np.float64), drift
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".csv":
            rows = [[float(cell) for cell in row] for row in csv.reader(text.splitlines()) if row]
            return np.asarray(rows, np.float64), drift
        data = json.loads(text)
        if isinstance(data, dict):
            data, drift = data["counts"], float(data.get("drift", 0.0))
        counts = np.asarray(data, np.float64)
    except OSError as error:
        raise SpecError(f"{error.strerror}: {path}") from error
    except (ValueError, KeyError, TypeError, EOFError, csv.Error, OverflowError, RecursionError, MemoryError) as error:
        raise SpecError(f"{path} holds no table of counts [layers, experts]: {error}") from error
    if not 0 <= drift <= MOST_DRIFT:
        raise SpecError(f"the drift in {path} must be from 0 to {MOST_DRIFT:g}, not {drift}")
    return counts, drift


def drift_of(windows: Floats, top_k: int) -> float:
    """Width of the lognormal factor by which windows differ beyond chance, from their counts [W, L, E].

    Squared deviations from the mean share, less B p (1 - p) of chance, over squared expectations; experts that expect
    10 rows of a window or more.
    """
    if len(windows) < 2:
        return 0.0
    rows = windows.sum(-1, keepdims=True) / top_k
    share = windows.sum(0) / np.maximum(rows.sum(0), 1.0)
    expected, chance = share * rows, share * (1 - share) * rows
    often = expected >= 10
    if not often.any():
        return 0.0
    seen = len(windows) / (len(windows) - 1) * (windows - expected) ** 2
    excess = (seen - chance)[often].sum() / (expected**2)[often].sum()
    return float(np.sqrt(np.log1p(max(excess, 0.0))))


@lru_cache(maxsize=1)
def shipped_traces() -> dict[str, Any]:
    """data/planner/trace.json: counts measured with the shipped model, and a curve fitted to published imbalance."""
    text = (files("coterie") / "data" / "planner" / "trace.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def capped(counts: Floats, top_k: int) -> Floats:
    """Counts [L, E] -> shares that sum to `top_k`, none above 1: the excess goes to the others in proportion."""
    shares = counts / counts.sum(1, keepdims=True) * top_k
    for _ in range(top_k):
        over = shares > 1
        if not over.any():
            break
        shares = np.minimum(shares, 1.0)
        rest = np.where(over | (shares >= 1), 0.0, shares)
        missing = top_k - shares.sum(1, keepdims=True)
        total = rest.sum(1, keepdims=True)
        even = np.where(shares < 1, 1.0, 0.0) / np.maximum((shares < 1).sum(1, keepdims=True), 1)
        shares += missing * np.where(total > 0, rest / np.where(total > 0, total, 1.0), even)
    return np.minimum(shares, 1.0)


def inclusion(weights: Floats, top_k: int) -> Floats:
    """Weights [L, E] -> probability that each expert is among `top_k` drawn one after another without replacement.

    Each expert rings after an exponential time of rate w; the first k are drawn (Gumbel top-k in other words). So
    P(e) = integral of w_e exp(-w_e t) P(fewer than k of the others rang by t) dt, and the last factor is a
    Poisson-binomial sum, computed from both ends of the list of experts so that e can be left out.
    """
    experts = weights.shape[1]
    if top_k == experts:
        return np.ones(weights.shape)
    if np.ptp(weights, 1).max() == 0:
        return np.full(weights.shape, top_k / experts)
    clocks = _clocks(weights / weights.sum(1, keepdims=True), top_k)
    rate = (weights / weights.sum(1, keepdims=True))[:, None, :]
    quiet = np.exp(-rate * clocks[..., None])
    before = _fewer(quiet, top_k)
    mass = quiet[:, :-1] - quiet[:, 1:]
    shares = (mass * (before[:, :-1] + before[:, 1:]) / 2).sum(1)
    return capped(np.maximum(shares, 1e-300), top_k)


def _clocks(rate: Floats, top_k: int) -> Floats:
    """Times [L, T] from 0, even steps in the expected number that has rung, until k have with certainty."""
    grid = np.concatenate([[0.0], np.geomspace(1e-3, 1e9, 400)])
    times = []
    for row in rate:
        rung = -np.expm1(-np.outer(grid, row)).sum(1)
        most = min(top_k + 7 * np.sqrt(top_k) + 3, len(row) - 1e-3)
        times.append(np.interp(np.linspace(0, most, _POINTS), rung, grid))
    return np.array(times)


def _fewer(quiet: Floats, top_k: int) -> Floats:
    """Probabilities [L, T, E] of silence -> that fewer than k of the other experts have rung."""
    layers, points, experts = quiet.shape
    below = np.empty((experts, layers, points, top_k))
    state = np.zeros((layers, points, top_k))
    state[..., 0] = 1.0
    for expert in range(experts):
        below[expert] = state
        state = _ring(state, quiet[..., expert])
    after = np.zeros((layers, points, top_k))
    after[..., 0] = 1.0
    found = np.empty(quiet.shape)
    for expert in range(experts - 1, -1, -1):
        found[..., expert] = (below[expert] * np.cumsum(after, -1)[..., ::-1]).sum(-1)
        after = _ring(after, quiet[..., expert])
    return found


def _ring(state: Floats, quiet: Floats) -> Floats:
    """One expert more: chances [L, T, k] of 0 to k - 1 rings."""
    silent = quiet[..., None]
    new = state * silent
    new[..., 1:] += state[..., :-1] * (1 - silent)
    return new


def clock_rates(shares: Floats, top_k: int) -> Floats:
    """The inverse of `inclusion`: rates [L, E] of clocks whose first k rings give these shares (within 0.1 %)."""
    wanted = -np.log1p(-np.clip(shares, 1e-12, 1 - 1e-9))
    rates = wanted.copy()
    for _ in range(2):
        rates *= wanted / -np.log1p(-np.clip(inclusion(rates, top_k), 1e-12, 1 - 1e-9))
    return rates


def is_small(tokens: int, experts: int) -> bool:
    """Whether batches of so many tokens are drawn token by token."""
    return tokens * experts <= _SMALL


def draw(shares: Floats, rates: Floats | None, top_k: int, tokens: int, rng: np.random.Generator) -> Floats:
    """Shares [N, E] -> counts [N, E] of one batch of `tokens` each; rows sum to tokens x k.

    With `rates` [N, E] (`clock_rates`) exactly, token by token. Without: a binomial count of each expert, and the
    excess of their sum taken from them by their variance B p (1 - p), which gives the covariance of large samples
    without replacement (Hajek).
    """
    number, experts = shares.shape
    if rates is not None:
        clocks = rng.standard_exponential((number, tokens, experts), np.float32) / rates[:, None].astype(np.float32)
        chosen = np.argpartition(clocks, top_k - 1, -1)[..., :top_k] + np.arange(number)[:, None, None] * experts
        return np.bincount(chosen.ravel(), minlength=number * experts).reshape(number, experts).astype(np.float64)
    shares = np.minimum(shares, 1.0)
    counts = rng.binomial(tokens, shares).astype(np.float64)
    variance = shares * (1 - shares)
    total = variance.sum(1, keepdims=True)
    excess = counts.sum(1, keepdims=True) - tokens * top_k
    counts = np.clip(counts - np.where(total > 0, variance / np.where(total > 0, total, 1), 0) * excess, 0, tokens)
    return np.asarray(counts * (tokens * top_k / counts.sum(1, keepdims=True)))
