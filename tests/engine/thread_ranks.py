"""Ranks as threads of one process: a transport whose exchanges block, and loops on real cores joined by it.

What the processes of `test_ranks` do over gloo, without imports that take a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from mock_engine import MockRunner, make_core

from coterie.comm.transport import Aborted, Handle
from coterie.engine.core import EngineCore
from coterie.engine.errors import Desynchronised
from coterie.engine.group import Group
from coterie.engine.messages import FromEngine, Output, Regroup, ToRank
from coterie.engine.worker import EngineLoop
from coterie.kernels.batch import ForwardBatch


class Done:
    """A handle whose result is there."""

    def __init__(self, value: Any, *, carries_rows: bool = False) -> None:
        self._value, self.carries_rows = value, carries_rows
        self.begun_ns = self.ended_ns = time.monotonic_ns()

    def wait(self) -> None:
        """Nothing to wait for."""

    def ready(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value


class Meeting:
    """What ranks of one group have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.posted: list[dict[int, Any]] = []
        self.aborted = False
        self.children: dict[tuple[str, tuple[int, ...]], Meeting] = {}

    def exchange(self, rank: int, number: int, value: Any, seconds: float = 30.0) -> list[Any]:
        with self.changed:
            while len(self.posted) <= number:
                self.posted.append({})
            self.posted[number][rank] = value
            self.changed.notify_all()
            full = self.changed.wait_for(lambda: self.aborted or len(self.posted[number]) == self.size, seconds)
            if not full or len(self.posted[number]) < self.size:
                raise Aborted("the group was given up" if full else "a rank did not come")
            return [self.posted[number][rank] for rank in range(self.size)]

    def child(self, name: str, members: tuple[int, ...]) -> Meeting:
        with self.changed:
            return self.children.setdefault((name, members), Meeting(len(members)))

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()
            children = list(self.children.values())
        for child in children:
            child.abort()


class ThreadTransport:
    """One thread's view of a meeting."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self.bytes_to = np.zeros(meeting.size, np.int64)
        self.number, self.seconds, self.waiting = -1, 30.0, False

    @classmethod
    def group(cls, size: int) -> list[ThreadTransport]:
        meeting = Meeting(size)
        return [cls(rank, meeting) for rank in range(size)]

    def _exchange(self, value: Any) -> list[Any]:
        self.number += 1
        return self._meeting.exchange(self.rank, self.number, value, self.seconds)

    def all_gather(self, values: np.ndarray) -> Handle:
        return Done(np.stack(self._exchange(np.array(values, np.int64))))

    def all_to_all_v(self, rows: np.ndarray, sent: Any, received: Any, out: np.ndarray | None = None) -> Handle:
        parts = self._exchange((rows.copy(), np.cumsum([0, *sent])))
        mine = [data[ends[self.rank] : ends[self.rank + 1]] for data, ends in parts]
        assert [len(part) for part in mine] == [int(count) for count in received]
        return Done(np.concatenate(mine, out=out), carries_rows=True)

    def subgroup(self, name: str, ranks: Sequence[int]) -> ThreadTransport:
        return ThreadTransport(list(ranks).index(self.rank), self._meeting.child(name, tuple(ranks)))

    def set_timeout(self, seconds: float) -> None:
        self.seconds = seconds

    def abort(self) -> None:
        self._meeting.abort()


class LockstepRunner(MockRunner):
    """A mock whose forward is an exchange with the other ranks and then the mock's own."""

    transport: ThreadTransport

    def run(self, batch: ForwardBatch, *, micro_batches: int = 1) -> np.ndarray:
        self.transport.all_gather(np.array([batch.num_tokens])).result()
        return super().run(batch, micro_batches=micro_batches)


class ThreadRank:
    """One rank: a core and its loop on a thread, and what it said. `ended`: how its last run did. `leave`: gives up
    what its peers may wait for."""

    def __init__(self, core: EngineCore, leave: Callable[[], None] = lambda: None) -> None:
        self.core, self.said, self.leave = core, list[FromEngine](), leave
        self.inbox: SimpleQueue[ToRank | None] = SimpleQueue()
        self.loop = EngineLoop(core, self.inbox, self.said.extend)
        self.ended: Regroup | Desynchronised | None = None
        self._thread = threading.Thread()

    def start(self, group: Group) -> None:
        self.loop.group = group

        def body() -> None:
            try:
                self.ended = self.loop.run()
            except Desynchronised as error:
                group.transport.abort()
                self.leave()
                self.ended = error

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "a rank hangs"

    def outputs(self, name: str) -> list[Output]:
        return [one for one in self.said if isinstance(one, Output) and one.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs(name) for token in output.token_ids]


def mock_ranks(size: int, make: Callable[[], LockstepRunner] = LockstepRunner, **core: Any) -> list[ThreadRank]:
    """Ranks on mock models, started as one group."""
    ranks = [ThreadRank(make_core(make(), **core)) for _ in range(size)]
    start_group(ranks, 1)
    return ranks


def start_group(ranks: Sequence[ThreadRank], generation: int) -> None:
    """A generation of mock ranks."""
    control, serve = ThreadTransport.group(len(ranks)), ThreadTransport.group(len(ranks))
    for rank, own, inner in zip(ranks, control, serve, strict=True):
        rank.core.runner.transport = inner  # type: ignore[attr-defined]
        rank.start(Group(own, generation))
