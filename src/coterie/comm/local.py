"""LocalTransport: N ranks inside one process, deterministic and without threads. Not for processes (`torch_dist`).

An exchange is complete when every rank has posted its part, so N stage generators driven in turn (`model.overlap`)
pass it together. What is posted is copied at once: a sender may reuse its buffer as soon as it has its own result.
World size one is the same code: its own part completes the exchange.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.comm.transport import (
    Aborted,
    CountMismatch,
    Counts,
    Int64,
    TransportError,
    check_counts,
    result_array,
)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank posted: rows in order of destination, and rows to each; `sent` None: a gather."""

    rows: NDArray[Any]
    sent: tuple[int, ...] | None


@dataclass(slots=True)
class _Exchange:
    """One collective of the local group: parts by source rank, complete when all have posted."""

    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass(slots=True)
class _LocalHandle:
    transport: LocalTransport
    exchange: _Exchange
    received: tuple[int, ...] | None
    out: NDArray[Any] | None
    taken: bool = False
    begun_ns: int = field(default_factory=time.monotonic_ns)
    ended_ns: int = 0

    @property
    def carries_rows(self) -> bool:
        return self.received is not None

    def ready(self) -> bool:
        return self.transport._group.aborted or len(self.exchange.parts) == self.transport.size

    def wait(self) -> None:
        if self.transport._group.aborted:
            raise Aborted("the local group was aborted")
        assert self.ready(), "result() before every rank has entered the exchange"
        self.ended_ns = self.ended_ns or time.monotonic_ns()

    def result(self) -> NDArray[Any]:
        self.wait()
        assert not self.taken, "a result is taken once"
        self.taken = True
        parts = [self.exchange.parts[source] for source in range(self.transport.size)]
        if self.received is None:
            return np.stack([part.rows for part in parts])
        pieces = [self._piece(source, part) for source, part in enumerate(parts)]
        out = result_array(pieces[0], sum(self.received), self.out)
        return np.concatenate(pieces, out=out)

    def _piece(self, source: int, part: _Part) -> NDArray[Any]:
        assert self.received is not None
        rank = self.transport.rank
        if part.sent is None:
            raise TransportError(f"rank {source} gathers while rank {rank} waits for rows: they took different ways")
        if part.sent[rank] != self.received[source]:
            raise CountMismatch(
                f"rank {source} sends {part.sent[rank]} rows to rank {rank}, which expects {self.received[source]}"
            )
        start = sum(part.sent[:rank])
        return part.rows[start : start + part.sent[rank]]


class _LocalGroup:
    """Shared state of N local ranks: the n-th exchange of every rank is the same collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open: dict[int, _Exchange] = {}
        self.subgroups: dict[tuple[str, tuple[int, ...]], _LocalGroup] = {}
        self.aborted = False

    def join(self, sequence: int, rank: int, part: _Part) -> _Exchange:
        exchange = self.open.setdefault(sequence, _Exchange())
        assert rank not in exchange.parts, "a rank entered one exchange twice"
        exchange.parts[rank] = part
        if len(exchange.parts) == self.size:
            del self.open[sequence]
        return exchange

    def abort(self) -> None:
        self.aborted = True
        for group in self.subgroups.values():
            group.abort()


class LocalTransport:
    """One of N ranks in this process. `LocalTransport.group(n)` makes all n; `LocalTransport()` is the group of one."""

    def __init__(self, rank: int = 0, group: _LocalGroup | None = None) -> None:
        self._group = group or _LocalGroup(1)
        self._sequence = 0
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.rank = rank
        self.size = self._group.size
        self.bytes_to: Int64 = np.zeros(self.size, np.int64)
        self.stamp_ends = self.waiting = False

    @classmethod
    def group(cls, size: int) -> list[LocalTransport]:
        """All ranks of a fresh group of `size`."""
        shared = _LocalGroup(size)
        return [cls(rank, shared) for rank in range(size)]

    def all_gather(self, values: Int64) -> _LocalHandle:
        values = np.array(values, np.int64)
        self.bytes_to += values.nbytes
        return self._enter(_Part(values, None), None, None)

    def all_to_all_v(
        self, rows: NDArray[Any], sent: Counts, received: Counts, out: NDArray[Any] | None = None
    ) -> _LocalHandle:
        to, came = check_counts(self, rows, sent, received)
        self.bytes_to += np.array(to, np.int64) * (rows.nbytes // max(len(rows), 1))
        return self._enter(_Part(rows.copy(), tuple(to)), tuple(came), out)

    def _enter(self, part: _Part, received: tuple[int, ...] | None, out: NDArray[Any] | None) -> _LocalHandle:
        if self._group.aborted:
            raise Aborted("the local group was aborted")
        exchange = self._group.join(self._sequence, self.rank, part)
        self._sequence += 1
        return _LocalHandle(self, exchange, received, out)

    def subgroup(self, name: str, ranks: Sequence[int]) -> LocalTransport:
        members = tuple(ranks)
        self._made[name, members] += 1  # a second group of one name is another group
        key = (f"{name}.{self._made[name, members]}", members)
        shared = self._group.subgroups.setdefault(key, _LocalGroup(len(members)))
        return LocalTransport(members.index(self.rank), shared)

    def set_timeout(self, seconds: float) -> None:
        """Nothing to do: an exchange that cannot complete is seen at once by who drives the ranks."""

    def abort(self) -> None:
        self._group.abort()
