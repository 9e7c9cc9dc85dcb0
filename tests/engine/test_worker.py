"""The engine's loop on a thread and behind a socket: same outputs, idle without spinning, garbage, death, drain."""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
from mock_engine import MockRunner, greedy, make_add, make_core

from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.errors import EngineDead
from coterie.engine.messages import Abort, Drain, FromEngine, Output, Stats, ToEngine
from coterie.engine.process import Hello, spawn, start_process
from coterie.engine.wire import Wire
from coterie.engine.worker import EngineLink, EngineLoop, serve_wire, start_thread
from coterie.spec.errors import CoterieError

CHILD = """
import socket, sys
sys.path.insert(0, {tests!r})
from mock_engine import make_core
from coterie.engine.messages import ToEngine
from coterie.engine.wire import Wire
from coterie.engine.worker import serve_wire
wire = Wire(socket.socket(fileno=int(sys.argv[1])), ToEngine, 1 << 20)
serve_wire(make_core(), wire, wire.receive())
print("ended", wire.num_rejected)
"""

PROMPTS = {"a": [97, 98, 99], "b": list(range(60, 100)), "c": [5]}


class Heard:
    """What came from an engine, and how it ended."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []
        self.reasons: SimpleQueue[str | None] = SimpleQueue()
        self._changed = threading.Condition()

    def deliver(self, messages: list[FromEngine]) -> None:
        with self._changed:
            self.messages += messages
            self._changed.notify_all()

    def wait(self, name: str) -> Output:
        """The last output of a sequence."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(o.finish_reason for o in self.of(name)), 30)
        return self.of(name)[-1]

    def of(self, name: str) -> list[Output]:
        return [m for m in self.messages if isinstance(m, Output) and m.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.of(name) for token in output.token_ids]

    @property
    def stats(self) -> list[Stats]:
        return [m for m in self.messages if isinstance(m, Stats)]


def start(core: EngineCore) -> tuple[EngineLink, Heard]:
    heard = Heard()
    return start_thread(core, heard.deliver, heard.reasons.put), heard


def test_on_a_thread_until_drained() -> None:
    core = make_core()
    link, heard = start(core)
    for name, prompt in PROMPTS.items():
        link.send(make_add(name, prompt))
    link.send(Drain())
    link.send(make_add("late", [1]))
    link.join(30)
    assert heard.reasons.get(timeout=5) is None
    assert {name: heard.tokens(name) for name in PROMPTS} == {n: greedy(p, 6) for n, p in PROMPTS.items()}
    assert heard.of("late")[0].finish_reason == "error" and "shutting down" in (heard.of("late")[0].error or "")
    assert heard.stats[-1].num_running == 0 and heard.stats[-1].num_free_blocks == 64


def test_abort_in_flight() -> None:
    link, heard = start(make_core(MockRunner(delay=0.01), max_model_len=10_000, blocks=3000))
    link.send(make_add("a", [1], 9000))
    link.send(Abort("unknown"))
    link.send(Abort("a"))
    link.send(Abort("a"))
    assert heard.wait("a").finish_reason == "abort"
    link.send(Drain())
    link.join(30)
    assert [output.finish_reason for output in heard.of("a") if output.finish_reason] == ["abort"]


class Inbox(SimpleQueue):  # type: ignore[type-arg]
    """Counts how often the loop looks for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def get(self, block: bool = True, timeout: float | None = None) -> ToEngine | None:
        self.looks += 1
        return super().get(block, timeout)


def test_idle_blocks_and_checks_itself_once() -> None:
    core, inbox, heard = make_core(), Inbox(), Heard()
    checks: list[float] = []
    check, core.check_integrity = core.check_integrity, lambda: checks.append(time.monotonic())  # type: ignore[method-assign]
    thread = threading.Thread(target=EngineLoop(core, inbox, heard.deliver).run)
    thread.start()
    inbox.put(make_add("a", [1]))
    heard.wait("a")
    time.sleep(0.3)
    assert inbox.looks == 2 and len(checks) == 1
    inbox.put(Drain())
    thread.join(30)
    check()


def test_stats_come_when_idle_and_not_with_every_step() -> None:
    link, heard = start(make_core())
    link.send(make_add("a", [1], 60))
    heard.wait("a")
    link.send(Drain())
    link.join(30)
    assert heard.stats[-1].generation_tokens == 60
    assert len(heard.stats) < 40


def test_death_of_the_loop_is_told() -> None:
    core = make_core()

    def broken() -> Stats:
        raise RuntimeError("no stats")

    core.stats = broken  # type: ignore[method-assign]
    link, heard = start(core)
    link.send(make_add("a", [1]))
    assert "RuntimeError: no stats" in (heard.reasons.get(timeout=30) or "")


@pytest.fixture
def child() -> Iterator[tuple[Wire[FromEngine], socket.socket, subprocess.Popen[str]]]:
    """A mock engine in another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    code = CHILD.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    yield Wire(ours, FromEngine), ours, process  # type: ignore[arg-type]
    ours.close()
    process.kill()
    process.communicate()


def listen(wire: Wire[FromEngine]) -> tuple[Heard, threading.Thread]:
    heard = Heard()

    def body() -> None:
        for message in wire.receive():
            heard.deliver([message])

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return heard, thread


def test_in_another_process_the_same_and_garbage_is_dropped(child) -> None:
    wire, connection, process = child
    heard, thread = listen(wire)
    garbage = [
        b"",
        b"\xc1\xff\x00",
        b"\x81" * 5000,
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "add", "request_id": "x"}),
        msgspec.msgpack.encode({"type": "output", "request_id": "x", "token_ids": []}),
        msgspec.msgpack.encode({"type": "exec", "code": "1"}),
        json.dumps({"type": "drain"}).encode(),
        b"\x80\x04\x95cposix\nsystem\n",
    ]
    for (name, prompt), junk in zip(PROMPTS.items(), (garbage[:3], garbage[3:6], garbage[6:]), strict=True):
        for data in junk:
            connection.sendall(struct.pack("<I", len(data)) + data)
        wire.send(make_add(name, prompt))
    wire.send(Drain())
    thread.join(30)
    assert {name: heard.tokens(name) for name in PROMPTS} == {n: greedy(p, 6) for n, p in PROMPTS.items()}
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and out == f"ended {len(garbage)}\n"


def test_a_frame_over_the_bound_ends_the_connection(child) -> None:
    wire, connection, process = child
    heard, thread = listen(wire)
    wire.send(make_add("a", [1]))
    heard.wait("a")
    connection.sendall(struct.pack("<I", 2**32 - 1) + b"x" * 100)
    thread.join(30)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and out == "ended 1\n"


def test_a_peer_that_leaves_ends_the_engine(child) -> None:
    wire, _, process = child
    wire.send(make_add("a", [1], 100))
    wire.close()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_an_output_that_is_too_large_is_an_error_of_its_request() -> None:
    ours, theirs = socket.socketpair()
    engine_side: Wire[ToEngine] = Wire(theirs, ToEngine, 4096)  # type: ignore[arg-type]
    wire: Wire[FromEngine] = Wire(ours, FromEngine)  # type: ignore[arg-type]
    heard, listener = listen(wire)
    server = threading.Thread(target=serve_wire, args=(make_core(), engine_side, engine_side.receive()))
    server.start()
    wire.send(msgspec.structs.replace(make_add("big", [1, 2, 3, 4, 5], 0), want_logits=True))
    wire.send(make_add("small", [1, 2]))
    assert "does not fit" in (heard.wait("big").error or "")
    heard.wait("small")
    assert heard.tokens("small") == greedy([1, 2], 6)
    wire.send(Drain())
    server.join(30)
    listener.join(30)


def test_sending_a_frame_over_the_bound_is_refused_here() -> None:
    ours, theirs = socket.socketpair()
    wire: Wire[ToEngine] = Wire(ours, ToEngine, 100)  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match="does not fit"):
        wire.send(make_add("a", range(200)))
    theirs.close()


def test_an_announced_frame_takes_no_memory_before_it_comes() -> None:
    ours, theirs = socket.socketpair()
    wire: Wire[ToEngine] = Wire(ours, ToEngine)  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    theirs.sendall(struct.pack("<I", 1 << 28) + b"abc")
    theirs.close()
    assert list(wire.receive()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_sending_to_a_peer_that_does_not_read_ends_in_time() -> None:
    ours, theirs = socket.socketpair()
    wire: Wire[ToEngine] = Wire(ours, ToEngine)  # type: ignore[arg-type]
    wire.limit_sending(0.2)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        wire.send("x" * (16 << 20))
    assert 0.1 < time.monotonic() - began < 10.0
    theirs.close()


def test_a_process_that_cannot_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(CoterieError, match="nonsense"):
        start_process(Hello(str(tmp_path), EngineConfig()))


def test_a_process_whose_parent_goes_while_it_loads_ends_without_a_word(
    tmp_path: Path, tiny_config: dict, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    wire, child = spawn(Hello(str(tmp_path), EngineConfig(load_format="dummy", threads=1, max_model_len=64)))
    wire.close()
    assert child.wait(timeout=60) == 1
    assert capfd.readouterr().err == ""


def test_sending_to_an_ended_process_is_engine_dead(tmp_path: Path, tiny_config: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    loads: list[tuple[int, int]] = []
    config = EngineConfig(load_format="dummy", threads=1, max_model_len=64, page_size=16)
    started = start_process(Hello(str(tmp_path), config), lambda done, total: loads.append((done, total)))
    heard = Heard()
    link = started.listen(heard.deliver, heard.reasons.put)
    link.send(make_add("a", [1, 2, 3]))
    assert heard.wait("a").finish_reason == "length" and len(heard.tokens("a")) == 6
    for ending in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group: the parent decides
        started.child.send_signal(ending)
    link.send(make_add("after", [1, 2, 3]))
    assert heard.wait("after").finish_reason == "length"
    link.kill()
    assert "exit status" in (heard.reasons.get(timeout=30) or "")
    with pytest.raises(EngineDead):
        link.send(make_add("b", [1]))
    assert started.ready.max_model_len == 64 and loads[-1][0] == loads[-1][1]
