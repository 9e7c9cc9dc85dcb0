"""drive: run stage generators to their end. One (plain, or EP over a real transport) or N local ranks in one process.

A generator yields a Handle where it would wait; it is resumed when the handle is ready. Driving several in turn lets
every local rank reach the same exchange before any goes on, without threads.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
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
