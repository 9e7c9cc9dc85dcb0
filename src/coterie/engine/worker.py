"""The engine's loop: read messages, step, hand out news. The same on a thread and at the end of a socket.

Idle, it blocks on its queue (no polling) after one `check_integrity()`. A failed request is the core's business; an
exception that reaches this loop ends it, and `closed` tells the front end. No asyncio here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from coterie.engine.core import EngineCore
from coterie.engine.messages import Abort, Add, Drain, FromEngine, Output, ToEngine
from coterie.engine.wire import Wire
from coterie.spec.errors import CoterieError

STATS_SECONDS = 0.05
"""Least time between two Stats of a busy engine."""

Deliver = Callable[[list[FromEngine]], None]
Closed = Callable[[str | None], None]
_log = logging.getLogger(__name__)


class EngineLoop:
    """`inbox` None means that the peer is gone: everything is aborted and the loop ends."""

    def __init__(self, core: EngineCore, inbox: SimpleQueue[ToEngine | None], deliver: Deliver) -> None:
        self.core = core
        self._inbox = inbox
        self._deliver = deliver
        self._draining = False
        self._last_stats = 0.0
        self._refused: list[Output] = []

    def run(self) -> None:
        """Serve until drained."""
        while self._read():
            outputs: list[FromEngine] = [*self._refused, *self.core.step()]
            self._refused = []
            now = time.monotonic()
            idle = not self.core.has_work
            if idle or now - self._last_stats >= STATS_SECONDS:
                self._last_stats = now
                outputs.insert(0, self.core.stats())
            if outputs:
                self._deliver(outputs)
            if idle:
                self.core.check_integrity()

    def _read(self) -> bool:
        """Take all messages that are there, waiting for one if there is nothing to do. False: the loop is over."""
        while not (self.core.has_work or self._refused):
            if self._draining:
                return False
            self._handle(self._inbox.get())
        while True:
            try:
                self._handle(self._inbox.get_nowait())
            except Empty:
                return True

    def _handle(self, message: ToEngine | None) -> None:
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
            case None:
                self._draining = True
                self.core.abort_all()


@dataclass(frozen=True, slots=True)
class EngineLink:
    """How a front end reaches its engine. `join` waits until the loop has ended; `kill` makes a stuck one end."""

    send: Callable[[ToEngine], None]
    join: Callable[[float | None], None]
    kill: Callable[[], None]


def start_thread(core: EngineCore, deliver: Deliver, closed: Closed) -> EngineLink:
    """Run a core's loop on a thread of this process. `deliver` and `closed` are called on that thread."""
    inbox: SimpleQueue[ToEngine | None] = SimpleQueue()

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


def serve_wire(core: EngineCore, wire: Wire[Any], messages: Iterable[ToEngine]) -> None:
    """Run a core's loop for the peer of a socket, until it drains or goes away. `messages`: what the wire receives."""
    inbox: SimpleQueue[ToEngine | None] = SimpleQueue()

    def read() -> None:
        for message in messages:
            inbox.put(message)
        inbox.put(None)

    def deliver(messages: list[FromEngine]) -> None:
        for message in messages:
            try:
                wire.send(message)
            except CoterieError as error:
                assert isinstance(message, Output)
                wire.send(Output(message.request_id, [], finish_reason="error", error=str(error)))

    threading.Thread(target=read, name="coterie-wire", daemon=True).start()
    try:
        EngineLoop(core, inbox, deliver).run()
    except OSError:
        _log.warning("the front end is gone; the engine stops")
    finally:
        wire.close()
