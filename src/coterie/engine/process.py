"""An engine in a process of its own: the parent's side (`start_process`) and the child's (`python -m`).

They share one socket pair, inherited by the child, so that no port or path is open to anybody else. First the parent
sends a Hello; the child loads, telling its progress, and answers Ready or Failed; from then on both speak engine
messages.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from coterie.engine.build import Progress, build_engine
from coterie.engine.config import NO_CLASSES, EngineConfig, ServiceConfig
from coterie.engine.errors import EngineDead
from coterie.engine.messages import Output, Stats, ToEngine
from coterie.engine.wire import Wire
from coterie.engine.worker import Closed, Deliver, EngineLink, serve_wire
from coterie.spec.errors import CoterieError


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What to load."""

    model_path: str
    config: EngineConfig
    service: ServiceConfig = NO_CLASSES


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Bytes loaded so far and in all."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine runs."""

    max_model_len: int
    report: list[tuple[str, str, str]]
    load_lines: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be built."""

    message: str


FromChild = Loading | Ready | Failed | Output | Stats


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A loaded engine in a child process. Call `listen` once to get its news."""

    ready: Ready
    wire: Wire[FromChild]
    child: subprocess.Popen[bytes]

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


def start_process(
    model_path: str, config: EngineConfig, progress: Progress | None = None, service: ServiceConfig = NO_CLASSES
) -> StartedProcess:
    """Start a child, let it load, and return when it is ready. Raises `CoterieError` with the child's own message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, "-m", "coterie.engine.process", str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    wire: Wire[FromChild] = Wire(ours, FromChild)  # type: ignore[arg-type]
    wire.send(Hello(model_path, config, service))
    for message in wire.receive():
        if isinstance(message, Ready):
            return StartedProcess(message, wire, child)
        if isinstance(message, Failed):
            child.wait()
            raise CoterieError(message.message)
        if isinstance(message, Loading) and progress is not None:
            progress(message.done, message.total)
    raise CoterieError(f"the engine's process ended while loading, with exit status {child.wait()}")


def main(descriptor: int) -> None:
    """The child: load what the Hello says, then serve until drained or alone."""
    connection = socket.socket(fileno=descriptor)
    wire: Wire[Hello | ToEngine] = Wire(connection, Hello | ToEngine)  # type: ignore[arg-type]
    messages = wire.receive()
    hello = next(messages, None)
    if not isinstance(hello, Hello):
        return
    try:
        core, info = build_engine(
            hello.model_path,
            hello.config,
            lambda done, total: wire.send(Loading(done, total)),
            service=hello.service,
        )
    except CoterieError as error:
        wire.send(Failed(str(error)))
        return
    report = [(choice.what, choice.value, choice.reason) for choice in info.report]
    wire.send(Ready(info.max_model_len, report, list(info.load_lines)))
    serve_wire(core, wire, engine_messages(messages))


def engine_messages(messages: Iterator[Hello | ToEngine]) -> Iterator[ToEngine]:
    """The rest of a connection: a second Hello is nothing."""
    for message in messages:
        if not isinstance(message, Hello):
            yield message


if __name__ == "__main__":
    main(int(sys.argv[1]))
