"""The engine's loop: read messages, agree, step, hand out news. The same on a thread and at the end of a socket.

Several ranks enter each step together: before it they exchange who has work, and after it all have computed, whoever
had none with zero rows. Alone, a rank agrees with itself. Idle, it blocks on its queue (no polling) after one
`check_integrity()`; ranks do so only together (see `Wake`). A failed request is the core's business; an exception that
reaches this loop ends it, and `closed` tells the front end. No asyncio here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from coterie.comm.link_use import LinkUse
from coterie.engine.core import EngineCore
from coterie.engine.group import Entry, Group
from coterie.engine.messages import Abort, Add, Drain, FromEngine, Output, Regroup, Stats, ToEngine, ToRank, Wake
from coterie.engine.rebalance import FAILED, Rebalancer
from coterie.engine.wire import Wire
from coterie.kernels.batch import ForwardBatch
from coterie.spec.errors import CoterieError

STATS_SECONDS = 0.05
"""Least time between two Stats of a busy engine."""

Deliver = Callable[[list[FromEngine]], None]
Closed = Callable[[str | None], None]
_log = logging.getLogger(__name__)


class EngineLoop:
    """`inbox` None means that the peer is gone: everything is aborted and the loop ends. `group`: the ranks that step
    together; `run` may be called again with another after Desynchronised, and returns a Regroup that was agreed on.
    `waits`: for a message."""

    def __init__(
        self, core: EngineCore, inbox: SimpleQueue[ToRank | None], deliver: Deliver, group: Group | None = None
    ) -> None:
        self.core, self.group = core, group or Group()
        self.rebalancer: Rebalancer | None = None
        self.links = LinkUse()
        self._moved = self._move_cycles = self._moves_failed = 0
        self.wake = 0
        self._inbox = inbox
        self._deliver = deliver
        self._draining = False
        self._last_stats = 0.0
        self._step_ns = 0
        self._idle, self._patient = True, True
        self.waits = False
        self._refused: list[Output] = []
        self._regroup: Regroup | None = None

    def run(self) -> Regroup | None:
        """Serve until all are drained (None), or until all have heard of the next generation (its Regroup).

        Raises Desynchronised when the group has broken: sequences and their cache are kept, the last step is not.
        """
        self._idle = self.group.transport.size == 1 and not self.core.has_work
        while True:
            self._read()
            plan = self.core.plan(patient=self._patient)
            table = self.group.exchange(self._entry(plan.batch))
            if table.generation > self.group.generation:
                return self.take_regroup()
            if table.num_tokens:
                began = time.monotonic_ns()
                shared = self.group.share(plan.batch, table)
                batch = replace(shared, most_tokens=max(table.tokens_by_rank))
                self.core.execute(plan._replace(batch=batch), self.group.micro_batches(table))
                self._step_ns = time.monotonic_ns() - began
                if self.rebalancer is not None:
                    self._move(self.rebalancer, table.least_moved)
            self._hand_out()
            self._patient = not table.num_tokens
            self._idle = not table.has_work and table.wakes_agree
            if self._idle:
                self.core.check_integrity()
                if table.all_drain:
                    return None

    def next_message(self) -> ToRank | None:
        """Wait for a message."""
        self.waits = True
        try:
            return self._inbox.get()
        finally:
            self.waits = False

    def take_regroup(self) -> Regroup | None:
        """The newest Regroup that was heard of since the last call."""
        regroup, self._regroup = self._regroup, None
        return regroup

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to do and nothing new is taken."""
        return self._draining and not self.core.has_work and not self._refused

    def handle(self, message: ToRank | None) -> None:
        """Take one message in."""
        match message:
            case Add() if self._draining:
                error = "the engine is shutting down and takes nothing new"
                self._refused.append(Output(message.request_id, [], finish_reason="error", error=error))
            case Add():
                self.core.add(message)
            case Abort():
                self.core.abort(message.request_id)
            case Drain():
                self._draining = True
            case Wake():
                self.wake = max(self.wake, message.number)
            case Regroup():
                self._regroup = message
            case None:
                self._draining = True
                self.core.abort_all()

    def _entry(self, batch: ForwardBatch) -> Entry:
        return Entry(
            generation=self.group.generation if self._regroup is None else self._regroup.generation,
            has_work=self.core.has_work or bool(self._refused),
            num_tokens=batch.num_tokens,
            wake=self.wake,
            drains=self._draining,
            step_ns=self._step_ns,
            moved=0 if self.rebalancer is None else self.rebalancer.progress,
            words=self.group.num_words(batch),
        )

    def _hand_out(self) -> None:
        """Deliver what is new; Stats now and then, and when this rank's work is done."""
        outputs: list[FromEngine] = [*self._refused, *self.core.take_news()]
        self._refused = []
        now = time.monotonic()
        if (outputs and not self.core.has_work) or now - self._last_stats >= STATS_SECONDS:
            self._last_stats = now
            outputs.insert(0, self.stats())
        if outputs:
            self._deliver(outputs)

    def stats(self) -> Stats:
        """The core's, with what moved here and what the exchanges carried."""
        return msgspec.structs.replace(
            self.core.stats(),
            experts_moved=self._moved,
            move_cycles=self._move_cycles,
            moves_failed=self._moves_failed,
            balancedness={} if self.rebalancer is None else self.rebalancer.balancedness,
            hops=self.links.by_class(),
        )

    def _move(self, rebalancer: Rebalancer, slowest: int) -> None:
        """Take over what has moved, and count."""
        cycles = rebalancer.cycles
        moved = rebalancer.after_step(slowest)
        self._moved += max(moved, 0)
        self._move_cycles += rebalancer.cycles - cycles
        self._moves_failed += moved == FAILED

    def _read(self) -> None:
        """Take all messages that are there, waiting for one if all ranks are idle."""
        while self._idle:
            message = self.next_message()
            self.handle(message)
            self._idle = isinstance(message, Abort)
        while True:
            try:
                self.handle(self._inbox.get_nowait())
            except Empty:
                return


@dataclass(frozen=True, slots=True)
class EngineLink:
    """How a front end reaches its engine. `join` waits until the loop has ended; `kill` makes a stuck one end.

    `unavailable` says why nothing new is taken just now, None if it is.
    """

    send: Callable[[ToEngine], None]
    join: Callable[[float | None], None]
    kill: Callable[[], None]
    unavailable: Callable[[], str | None] = lambda: None


def start_thread(core: EngineCore, deliver: Deliver, closed: Closed) -> EngineLink:
    """Run a core's loop on a thread of this process. `deliver` and `closed` are called on that thread."""
    inbox: SimpleQueue[ToRank | None] = SimpleQueue()

    def body() -> None:
        reason: str | None = None
        try:
            EngineLoop(core, inbox, deliver).run()
        except Exception as error:
            _log.exception("the engine's loop ended")
            reason = f"the engine's loop ended: {type(error).__name__}: {error}"
        closed(reason)

    thread = threading.Thread(target=body, name="coterie-engine", daemon=True)
    thread.start()
    return EngineLink(inbox.put, thread.join, lambda: inbox.put(None))


def deliver_to(wire: Wire[Any]) -> Deliver:
    """Send messages; one that does not fit in a frame becomes an error of its request."""

    def deliver(messages: list[Any]) -> None:
        for message in messages:
            try:
                wire.send(message)
            except CoterieError as error:
                assert isinstance(message, Output)
                wire.send(Output(message.request_id, [], finish_reason="error", error=str(error)))

    return deliver


def serve_wire(core: EngineCore, wire: Wire[Any], messages: Iterable[ToEngine]) -> None:
    """Run a core's loop for the peer of a socket, until it drains or goes away. `messages`: what the wire receives."""
    inbox: SimpleQueue[ToRank | None] = SimpleQueue()

    def read() -> None:
        for message in messages:
            inbox.put(message)
        inbox.put(None)

    threading.Thread(target=read, name="coterie-wire", daemon=True).start()
    try:
        EngineLoop(core, inbox, deliver_to(wire)).run()
    except OSError:
        _log.warning("the front end is gone; the engine stops")
    finally:
        wire.close()
