"""An engine in a process of its own: the parent's side (`start_process`) and the child's (`python -m`).

They share one socket pair, inherited by the child, so that no port or path is open to anybody else. First the parent
sends a Hello; the child loads, telling its progress, and answers Ready or Failed; from then on both speak engine
messages. With a seat the child is one of several ranks, and waits for the front end to form a group.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from coterie.engine.build import Progress, Share, build_engine
from coterie.engine.config import NO_CLASSES, EngineConfig, ServiceConfig
from coterie.engine.errors import EngineDead
from coterie.engine.fingerprint import Fingerprint, fingerprint
from coterie.engine.memory import available_memory
from coterie.engine.messages import FromRank, Output, Stats, ToEngine, ToRank
from coterie.engine.rank import Rank, Seat, serve_rank
from coterie.engine.remote import Join, RemoteChild
from coterie.engine.wire import Wire
from coterie.engine.worker import Closed, Deliver, EngineLink, serve_wire
from coterie.kernels.machine import machine
from coterie.model.shard import ExpertShard
from coterie.spec.errors import CoterieError


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What to load."""

    model_path: str
    config: EngineConfig
    service: ServiceConfig = NO_CLASSES
    seat: Seat | None = None


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Bytes loaded so far and in all."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine runs, or the rank is loaded. `fingerprint`: of a rank."""

    max_model_len: int
    report: list[tuple[str, str, str]]
    load_lines: list[str]
    fingerprint: Fingerprint | None = None
    kv_cache_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be built."""

    message: str


Child = subprocess.Popen[bytes] | RemoteChild

FromChild = Loading | Ready | Failed | Join | FromRank


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A loaded engine in a child process. Call `listen` once to get its news."""

    ready: Ready
    wire: Wire[FromChild]
    child: Child

    def listen(self, deliver: Deliver, closed: Closed) -> EngineLink:
        """Start reading news on a thread; `closed` is called when the child has ended."""

        def body() -> None:
            for message in self.wire.receive():
                if isinstance(message, Output | Stats):
                    deliver([message])
            self.wire.close()
            code = self.child.wait()
            closed(None if code == 0 else f"the engine's process ended with exit status {code}")

        def send(message: ToEngine) -> None:
            try:
                self.wire.send(message)
            except OSError as error:
                raise EngineDead(f"the engine's process is gone: {error}") from error

        thread = threading.Thread(target=body, name="coterie-wire", daemon=True)
        thread.start()
        return EngineLink(send, thread.join, self.child.kill)


def start_process(hello: Hello, progress: Progress | None = None) -> StartedProcess:
    """Start a child, let it load, and return when it is ready. Raises `CoterieError` with the child's own message."""
    return wait_ready(*spawn(hello), progress)


def spawn(hello: Hello) -> tuple[Wire[FromChild], subprocess.Popen[bytes]]:
    """Start a child that begins to load."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, "-m", "coterie.engine.process", str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    wire: Wire[FromChild] = Wire(ours, FromChild)  # type: ignore[arg-type]
    wire.send(hello)
    return wire, child


def wait_ready(wire: Wire[FromChild], child: Child, progress: Progress | None = None) -> StartedProcess:
    """Wait until a child is loaded."""
    for message in wire.receive():
        if isinstance(message, Ready):
            return StartedProcess(message, wire, child)
        if isinstance(message, Failed):
            child.wait()
            raise CoterieError(message.message)
        if isinstance(message, Loading) and progress is not None:
            progress(message.done, message.total)
    raise CoterieError(f"the engine's process ended while loading, with exit status {child.wait()}")


def seat_share(seat: Seat) -> Share:
    """What a seat says of the model."""
    moves = seat.rebalance.moves if seat.rebalance.steps else 0
    memory = seat.memory or available_memory() // seat.local_size
    return Share(ExpertShard(seat.experts), memory, moves, seat.split)


def main(descriptor: int) -> None:
    """The child: load what the Hello says, then serve until drained or alone. When to end is the parent's word."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # a terminal and a service manager tell children too, at once
        signal.signal(ending, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    wire: Wire[Hello | ToRank] = Wire(connection, Hello | ToRank)  # type: ignore[arg-type]
    messages = wire.receive()
    hello = next(messages, None)
    if not isinstance(hello, Hello):
        return

    def tell(message: FromChild) -> None:
        try:
            wire.send(message)
        except OSError:
            os._exit(1)  # the parent has gone while this loaded: nobody is left to hear of it

    seat = hello.seat
    if seat is not None:  # takes a second in which nothing else here runs: not once there must be signs of life
        importlib.import_module("coterie.comm.torch_dist")
    config, share = hello.config, None
    if seat is not None:
        share = seat_share(seat)
        config = replace(config, threads=config.threads or max(1, machine().threads // seat.local_size))
    try:
        core, info = build_engine(
            hello.model_path,
            config,
            lambda done, total: tell(Loading(done, total)),
            service=hello.service,
            share=share,
        )
        mark = None if seat is None else fingerprint(info)
    except CoterieError as error:
        tell(Failed(str(error)))
        return
    report = [(choice.what, choice.value, choice.reason) for choice in info.report]
    capacity = core.scheduler.pool.num_blocks * hello.config.page_size
    tell(Ready(info.max_model_len, report, list(info.load_lines), mark, capacity))
    if seat is None:
        serve_wire(core, wire, engine_messages(messages))
    else:
        serve_rank(Rank(core, info, seat), wire, engine_messages(messages))


def engine_messages(messages: Iterator[Hello | ToRank]) -> Iterator[Any]:
    """The rest of a connection: a second Hello is nothing."""
    for message in messages:
        if not isinstance(message, Hello):
            yield message


if __name__ == "__main__":
    main(int(sys.argv[1]))
