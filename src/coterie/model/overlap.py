"""drive: run stage generators to their end. One (plain, or EP over a real transport) or N local ranks in one process.

A generator yields a Handle where it would wait; it is resumed when the handle is ready. Driving several in turn lets
every local rank reach the same exchange before any goes on, without threads. `interleave` makes one generator of two
micro-batches of a rank, so that the exchanges of each run under the compute of the other (two-batch overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from coterie.comm.transport import Handle

Stages = Generator[Handle, None, Any]


def drive(stages: Stages) -> Any:
    """Run one generator to its end and return its value."""
    return drive_all([stages])[0]


def drive_all(ranks: Sequence[Stages]) -> list[Any]:
    """Run several generators in turn; each goes on when its handle is ready. Returns their values in order."""
    waiting: dict[int, Handle | None] = dict.fromkeys(range(len(ranks)))
    results: list[Any] = [None] * len(ranks)
    while waiting:
        progressed = False
        for index, handle in list(waiting.items()):
            if handle is not None and not handle.ready():
                continue
            progressed = True
            try:
                waiting[index] = next(ranks[index])
            except StopIteration as end:
                results[index] = end.value
                del waiting[index]
        assert progressed, "every rank waits for an exchange that no other will enter"
    return results


def interleave(micro_batches: Sequence[Stages], entering: Callable[[int], None]) -> Stages:
    """Several micro-batches of one rank as one generator, in strict turns; its value is the list of theirs.

    A turn ends where rows travel. Before micro-batch i goes on, `entering(i)` is called. Each is resumed in order even
    if another is ready first: all ranks then enter their exchanges in the same order, and a layer's cache rows of the
    first half are written before the second half attends to them. If one raises, the others are closed.
    """
    results: list[Any] = [None] * len(micro_batches)
    pending: dict[int, Handle] = {}

    def advance(index: int) -> Stages:
        """To its next payload, or its end. Words between the ranks are waited for at once: while they are under way,
        the other half could only delay the rows that they announce."""
        entering(index)
        pending.pop(index, None)
        try:
            while not (handle := next(micro_batches[index])).carries_rows:
                yield handle
            pending[index] = handle
        except StopIteration as end:
            results[index] = end.value

    try:
        for index in range(len(micro_batches)):
            yield from advance(index)
        while pending:
            for index in list(pending):
                yield pending[index]
                yield from advance(index)
    finally:
        for stages in micro_batches:
            stages.close()
    return results
