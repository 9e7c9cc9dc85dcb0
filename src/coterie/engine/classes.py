"""Service classes: who is promised how much of a step, of the rows and of the cache, and who gets what is left.

Arithmetic only: no requests, no clock, no model. A class is its rank, 0 the highest. Its weight is the seed's factor
(1.8, 1.3, 1.0) times what was configured, its share g the weight's part of the sum. Virtual time counts what a class
was served (1 a prompt token, 2 a decoded one) over its weight: the class with the least gets what nobody was promised.
Classes decide who is computed when, never what: they do not reach the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coterie.engine.config import ServiceConfig
from coterie.engine.messages import ServiceClass

CLASS_NAMES: tuple[ServiceClass, ...] = ("gold", "silver", "bronze")
FACTORS = (1.8, 1.3, 1.0)
DECODE_COST = 2.0
"""Virtual time of a decoded token; a prompt token has 1."""
MAX_EVICTIONS = 2
"""How often a higher class may take a request's pages; then nobody may."""
PATIENCE = 0.5
"""Share of its deadline that a request waits before it takes pages from a lower class."""
MAX_CLASS_OVERTAKES = 64
"""Later arrivals of other classes that may be admitted before a request for which there was no room, as one that needs
more than its class's own; then it is the next one."""


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The classes of one engine, the highest first. `slo_seconds`: deadlines of the first token."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    slo_seconds: tuple[float, ...]

    @classmethod
    def of(cls, config: ServiceConfig) -> ClassTable:
        """The table that a config asks for: all three classes, or one for everybody."""
        if not config.enabled:
            return ONE_CLASS
        weights = tuple(factor * weight for factor, weight in zip(FACTORS, config.weights, strict=True))
        return cls(CLASS_NAMES, weights, config.slo_seconds)

    def __len__(self) -> int:
        return len(self.names)

    def rank(self, name: str | None) -> int:
        """Rank of a class by name; without classes everybody has rank 0."""
        return 0 if name is None or len(self) == 1 else self.names.index(name)

    def share(self, rank: int) -> float:
        """The part of everything that a class is promised, 0 to 1."""
        return self.weights[rank] / sum(self.weights)

    def reserved(self, total: int) -> tuple[int, ...]:
        """Whole units of `total` that each class is promised; they never add up to more."""
        return tuple(math.floor(self.share(rank) * total + 1e-9) for rank in range(len(self)))


ONE_CLASS = ClassTable(("default",), (1.0,), (math.inf,))
"""What an engine has that was not told of classes."""


@dataclass(slots=True)
class ClassCounters:
    """One class's totals since the start: tokens computed, and requests that a higher class put back to the queue."""

    prompt_tokens: int = 0
    decode_tokens: int = 0
    evictions: int = 0


class Shares:
    """What each class is promised of a step and what it was served. `tokens` and `rows`: a step's, by rank.

    `times` are virtual: what a class was served over its weight, for busy classes never further apart than `bound`. A
    class that is ahead of what it is owed is forgiven the rest, one that lags far behind has no more to claim: so
    neither a long idle time nor an odd mix of prompts and decoding is paid back for ever. A higher class that lags has
    its prompts computed before those of lower ones: it comes back to an engine that was lent.
    """

    def __init__(self, table: ClassTable, token_budget: int, max_running: int) -> None:
        self._weights = table.weights
        self.tokens = table.reserved(token_budget)
        self.rows = tuple(max(1, rows) for rows in table.reserved(max_running))
        self.bound = 2.0 * max(token_budget, DECODE_COST * max_running) / min(table.weights)
        self.times = [0.0] * len(table)
        self.counters = [ClassCounters() for _ in table.names]

    def begin(self, rank: int, busy: Collection[int]) -> None:
        """A class has work again while the classes `busy` have some: what it lent them counts, within the bound."""
        if busy:
            self.times[rank] = max(self.times[rank], max(self.times[other] for other in busy) - self.bound)

    def is_ahead(self, rank: int, busy: Collection[int]) -> bool:
        """Whether a class was served more than a higher one for its weight: then its prompts come after theirs."""
        return any(self.times[other] < self.times[rank] for other in busy if other < rank)

    def charge(self, served: Sequence[tuple[int, int]], busy: Collection[int]) -> None:
        """Add a step's (prompt tokens, decoded tokens) of each class, then bring the busy ones within the bound."""
        for rank, (prompt, decoded) in enumerate(served):
            self.times[rank] += (prompt + DECODE_COST * decoded) / self._weights[rank]
            self.counters[rank].prompt_tokens += prompt
            self.counters[rank].decode_tokens += decoded
        if busy:
            least = max(self.times[rank] for rank in busy) - self.bound
            for rank in busy:
                self.times[rank] = max(self.times[rank], least)

    def split(self, tokens: int, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """Divide tokens among classes so that the least virtual times rise together: (rank, tokens) by those times."""
        order = sorted(ranks, key=lambda rank: (self.times[rank], rank))
        weight = filled = level = 0.0
        for position, rank in enumerate(order):
            weight += self._weights[rank]
            filled += self._weights[rank] * self.times[rank]
            level = (tokens + filled) / weight
            if position + 1 == len(order) or level <= self.times[order[position + 1]]:
                break
        given = {
            rank: max(0, math.floor(self._weights[rank] * (level - self.times[rank]) + 1e-9)) for rank in order
        }
        for _ in range(tokens - sum(given.values())):
            given[min(order, key=lambda rank: self.times[rank] + (given[rank] + 1) / self._weights[rank])] += 1
        return [(rank, given[rank]) for rank in order]
