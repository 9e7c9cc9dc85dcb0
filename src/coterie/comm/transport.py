"""THE TRANSPORT DOOR: exchanges between expert-parallel ranks, and `LocalTransport`, N ranks inside one process.

An exchange returns a `Handle`; the caller yields it (a stage generator waits nowhere else) and then takes its result.
`model.overlap.drive` resumes a generator once its handle is ready. LocalTransport needs no threads: an exchange is
complete when every rank has posted its part, so N generators driven in turn are deterministic. World size one is the
same code: its own part completes it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Handle(Protocol):
    """A pending exchange."""

    def ready(self) -> bool:
        """Whether `result` may be called."""

    def result(self) -> Any:
        """What arrived; valid once, after `ready`."""


class Transport(Protocol):
    """One rank's view of its group."""

    rank: int
    size: int

    def all_to_all_v(self, parts: list[Any]) -> Handle:
        """Send `parts[r]` (rows first, zero rows allowed) to rank r; the result lists what each rank sent here."""


@dataclass(slots=True)
class _Exchange:
    """One collective of the local group: parts by source rank, complete when all have posted."""

    parts: dict[int, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LocalHandle:
    exchange: _Exchange
    rank: int
    size: int

    def ready(self) -> bool:
        return len(self.exchange.parts) == self.size

    def result(self) -> list[Any]:
        assert self.ready(), "result() before every rank has entered the exchange"
        return [self.exchange.parts[source][self.rank] for source in range(self.size)]


class _LocalGroup:
    """Shared state of N local ranks: the n-th exchange of every rank is the same collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open: dict[int, _Exchange] = {}

    def join(self, sequence: int, rank: int, parts: list[Any]) -> _Exchange:
        exchange = self.open.setdefault(sequence, _Exchange())
        assert rank not in exchange.parts, "a rank entered one exchange twice"
        exchange.parts[rank] = parts
        if len(exchange.parts) == self.size:
            del self.open[sequence]
        return exchange


class LocalTransport:
    """One of N ranks in this process. `LocalTransport.group(n)` makes all n; `LocalTransport()` is the group of one."""

    def __init__(self, rank: int = 0, group: _LocalGroup | None = None) -> None:
        self._group = group or _LocalGroup(1)
        self._sequence = 0
        self.rank = rank
        self.size = self._group.size

    @classmethod
    def group(cls, size: int) -> list[LocalTransport]:
        """All ranks of a fresh group of `size`."""
        shared = _LocalGroup(size)
        return [cls(rank, shared) for rank in range(size)]

    def all_to_all_v(self, parts: list[Any]) -> Handle:
        assert len(parts) == self.size, f"{len(parts)} parts for {self.size} ranks"
        exchange = self._group.join(self._sequence, self.rank, parts)
        self._sequence += 1
        return _LocalHandle(exchange, self.rank, self.size)


def split_rows(rows: Any, counts: NDArray[np.integer]) -> list[Any]:
    """Cut an array into consecutive parts of `counts` rows."""
    ends = np.cumsum(counts)
    return [rows[int(end - count) : int(end)] for count, end in zip(counts, ends, strict=True)]
