"""Room: how many blocks are promised to whom, and whose may be taken. It counts and chooses; the scheduler moves.

A running request is promised what its known tokens need and one page more; one that may not be preempted any more is
promised all that it can ever need. What is free beyond the promises may be given to a waiting request. With service
classes, blocks beyond a class's own are lent while no other class waits for its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coterie.cache.block_pool import BlockPool
from coterie.engine.classes import MAX_CLASS_OVERTAKES, MAX_EVICTIONS, PATIENCE, ClassTable
from coterie.engine.request import Request


@dataclass(slots=True)
class _Counts:
    """`free`: blocks promised to nobody. `held`: owned by or promised to each class."""

    free: int
    held: list[int]


class Room:
    """Reads a scheduler's live list of running requests, in order of arrival; `forget` tells it of changes."""

    def __init__(self, pool: BlockPool, page_size: int, classes: ClassTable, running: Sequence[Request]) -> None:
        self.own = classes.reserved(pool.num_blocks)
        self._pool, self._page_size, self._classes, self._running = pool, page_size, classes, running
        self._counted: _Counts | None = None

    def forget(self) -> None:
        """What was counted holds no longer."""
        self._counted = None

    @property
    def _counts(self) -> _Counts:
        if self._counted is None:
            held, promised = [0] * len(self._classes), 0
            for request in self._running:
                missing = self.missing(request, len(request.block_ids))
                promised += missing
                held[request.rank] += len(request.block_ids) + missing
            self._counted = _Counts(self._pool.num_free - promised, held)
        return self._counted

    @property
    def free(self) -> int:
        """Free blocks that are promised to nobody."""
        return self._counts.free

    def pages(self, rows: int) -> int:
        """Blocks that hold so many rows."""
        return -(-rows // self._page_size)

    def missing(self, request: Request, owned: int) -> int:
        """Blocks that a request is promised beyond `owned`."""
        wanted = self.pages(request.max_cache_rows)
        if may_lose(request):
            wanted = min(self.pages(request.num_tokens) + 1, wanted)
        return max(wanted - owned, 0)

    def needed(self, request: Request, blocks: Sequence[int]) -> int:
        """Free blocks that admission on the cached prefix `blocks` takes or promises."""
        return self.missing(request, len(blocks)) + sum(self._pool.ref_count(block) == 0 for block in blocks)

    def take(self, request: Request, needed: int) -> bool:
        """Promise so many blocks to a request that is being admitted; False if they are not there."""
        counts = self._counts
        if needed > counts.free:
            return False
        counts.free -= needed
        counts.held[request.rank] += needed
        return True

    def owed(self, request: Request, needed: int, waiting: Iterable[int]) -> int:
        """Free blocks that `request` may not borrow, as the classes `waiting` wait and have less than their own."""
        rank, held = request.rank, self._counts.held
        if not self._running or request.num_overtakes >= MAX_CLASS_OVERTAKES or held[rank] + needed <= self.own[rank]:
            return 0
        return sum(max(0, self.own[other] - held[other]) for other in waiting if other != rank)

    def lenders(self, request: Request, lacking: int, now: float) -> list[Request]:
        """Whom to preempt so that `lacking` blocks become free for a request that has waited too long for its class's
        own: lower classes that borrowed, the lowest and the least progress first. None if that would be too little.
        """
        rank, held = request.rank, self._counts.held
        within = held[rank] + self.missing(request, 0) <= self.own[rank] or not held[rank]
        if lacking <= 0 or not within:
            return []
        if now - request.arrival_time <= PATIENCE * self._classes.slo_seconds[rank]:
            return []
        lower = [r for r in self._running if r.rank > rank and self._has_borrowed(r.rank) and may_lose(r)]
        lower.sort(key=lambda r: (-r.rank, r.num_computed_tokens, -r.order))
        victims = []
        for victim in lower:
            if lacking <= 0:
                break
            victims.append(victim)
            lacking -= sum(self._pool.ref_count(block) == 1 for block in victim.block_ids)
            lacking -= self.missing(victim, len(victim.block_ids))
        return victims if lacking <= 0 else []

    def for_growth(self, request: Request) -> int:
        """Free blocks that a running request may take: all but those of others that may not be preempted any more."""
        free = self._pool.num_free
        if len(self._classes) > 1:
            safe = (r for r in self._running if r is not request and not may_lose(r))
            free -= sum(self.missing(r, len(r.block_ids)) for r in safe)
        return free

    def latest_after(self, request: Request) -> Request | None:
        """Whom a request may preempt to grow: of classes that borrowed if any, then of the lowest, the latest."""
        if len(self._classes) == 1:
            last = self._running[-1]
            return None if last is request else last
        key = (request.rank, request.order)
        after = (r for r in self._running if (r.rank, r.order) > key and may_lose(r))
        return max(after, key=lambda r: (self._has_borrowed(r.rank), r.rank, r.order), default=None)

    def _has_borrowed(self, rank: int) -> bool:
        return self._counts.held[rank] > self.own[rank]


def may_lose(request: Request) -> bool:
    """Whether a request may still be preempted; one that higher classes did so to twice may not."""
    return request.num_evictions < MAX_EVICTIONS
