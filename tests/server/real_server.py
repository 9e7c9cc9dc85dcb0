"""A real engine behind the real HTTP server, with eyes on what crosses between them and on each step.

`Spy` keeps what the front end sends and what the engine says, and which sequences each step computes; `hold` stops the
engine's thread inside a step. `ScriptRunner` stands where a model stands and gives the bytes that a test wrote down.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
from server_fakes import TINY, Live, eventually, tiny_folder

from coterie.cache.block_pool import BlockPool
from coterie.engine.build import EngineInfo, build_engine, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.frontend import AsyncEngine
from coterie.engine.messages import Abort, Add, FromEngine, Output, ToEngine
from coterie.engine.request import Request
from coterie.engine.runner import ModelRunner
from coterie.engine.sampler import Sampler
from coterie.engine.scheduler import Scheduler, SchedulerLimits
from coterie.engine.worker import EngineLink, start_thread
from coterie.kernels.batch import ForwardBatch
from coterie.observe.stages import StageTimer

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
EOS = 257


def long_folder(folder: Path) -> Path:
    """`tiny_folder` with room for 8,192 positions."""
    tiny_folder(folder)
    (folder / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 8192}))
    return folder


class ScriptRunner:
    """The answer to the prompt [key] is scripts[key], a byte a token; after its end comes the end token."""

    def __init__(self, scripts: dict[int, bytes]) -> None:
        self.timer = StageTimer()
        self._scripts, self._memory = scripts, dict[int, int]()

    def run(self, batch: ForwardBatch, *, micro_batches: int = 1) -> np.ndarray:
        assert batch.slot_mapping is not None and batch.block_tables is not None
        self._memory.update(zip(batch.slot_mapping.tolist(), batch.token_ids.tolist(), strict=True))
        rows = np.zeros((len(batch.logit_rows), TINY["vocab_size"]), np.float32)
        for values, row in zip(rows, batch.logit_rows.tolist(), strict=True):
            sequence = int(np.searchsorted(batch.query_start, row, "right")) - 1
            first = int(batch.block_tables[sequence, 0]) * batch.page_size
            answer = [*self._scripts[self._memory[first]], EOS]
            values[answer[int(batch.positions[row])]] = 20
        return rows


class Spy:
    """What was said and computed. Written by the server's and the engine's threads, read by the test."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.sent: list[ToEngine] = []
        self.tokens: Counter[str] = Counter()
        self.ended: dict[str, str] = {}
        self.steps: list[set[str]] = []
        self.preemptions: Counter[str] = Counter()
        self.steps_at_abort: dict[str, int] = {}
        self.held, self.release = threading.Event(), threading.Event()
        self._hold: Callable[[Request], bool] | None = None
        self._run = core.runner.run
        core.runner.run = self._watched  # type: ignore[method-assign]

    @property
    def adds(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Add)]

    @property
    def aborts(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Abort)]

    @property
    def is_quiet(self) -> bool:
        return not self.core.has_work and self.core.scheduler.pool.usage == 0

    def computed(self, request_id: str) -> int:
        """Steps that computed a sequence."""
        return sum(request_id in step for step in list(self.steps))

    def hold(self, when: Callable[[Request], bool]) -> None:
        """Stop in the next step that computes such a request, until `release` is set."""
        self.held.clear()
        self.release.clear()
        self._hold = when

    def _watched(self, batch: ForwardBatch, *, micro_batches: int = 1) -> np.ndarray:
        requests = [request for request in self.core.scheduler.requests() if request.num_scheduled_tokens]
        self.steps.append({request.request_id for request in requests})
        for request in requests:
            self.preemptions[request.request_id] = request.num_preemptions
        if self._hold is not None and any(map(self._hold, requests)):
            self._hold = None
            self.held.set()
            assert self.release.wait(30)
        return self._run(batch, micro_batches=micro_batches)

    def link(self, engine: AsyncEngine) -> EngineLink:
        """Start the engine's thread with ears on both directions."""
        deliver, closed = engine.callbacks()

        def heard(messages: list[FromEngine]) -> None:
            for message in messages:
                if isinstance(message, Output):
                    self.tokens[message.request_id] += len(message.token_ids)
                    if message.finish_reason is not None:
                        assert message.request_id not in self.ended, "a sequence ended twice"
                        self.ended[message.request_id] = message.finish_reason
            deliver(messages)

        link = start_thread(self.core, heard, closed)

        def send(message: ToEngine) -> None:
            if isinstance(message, Abort):
                self.steps_at_abort[message.request_id] = len(self.steps)
            self.sent.append(message)
            link.send(message)

        return EngineLink(send, link.join, link.kill)


@contextlib.contextmanager
def serving(core: EngineCore, info: EngineInfo, **server: Any) -> Iterator[tuple[Live, Spy]]:
    """A live server on an engine; the engine's books are checked at the end."""
    spy = Spy(core)

    def launch(observer: Any) -> AsyncEngine:
        engine = AsyncEngine(info, "tiny")
        engine.connect(spy.link(engine))
        engine.observer = observer
        return engine

    running = Live(launch, **server)
    running.start()
    try:
        assert running.ready.wait(60), running.error
        yield running, spy
    finally:
        spy.release.set()
        with contextlib.suppress(RuntimeError):
            running.stop(times=2)
        running.join()
    assert running.error is None
    core.check_integrity()


@contextlib.contextmanager
def real_server(folder: Path, server: dict[str, Any] | None = None, **engine: Any) -> Iterator[tuple[Live, Spy]]:
    """The tiny model with random weights behind the server."""
    settings = {"load_format": "dummy", "threads": 1, "page_size": 16, "chunked_prefill_size": 32} | engine
    core, info = build_engine(folder, EngineConfig(**settings))
    with serving(core, info, **server or {}) as pair:
        yield pair


@contextlib.contextmanager
def scripted_server(folder: Path, scripts: dict[int, bytes]) -> Iterator[tuple[Live, Spy]]:
    """The server on an engine whose answers are written down."""
    config = EngineConfig(max_running_requests=8, page_size=16)
    limits = SchedulerLimits(max_running=8, page_size=16)
    runner = cast(ModelRunner, ScriptRunner(scripts))
    scheduler = Scheduler(limits, BlockPool(256), (EOS,))
    core = EngineCore(scheduler, runner, Sampler((EOS,)), vocab_size=TINY["vocab_size"], max_model_len=512)
    with serving(core, EngineInfo(open_model(folder), config, 512, ())) as pair:
        yield pair


def open_request(url: str, body: dict[str, Any], path: str = TEXT) -> socket.socket:
    """Send a request and leave the connection open."""
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait(condition: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    assert eventually(condition, 30)


@contextlib.contextmanager
def shipped_server(**engine: Any) -> Iterator[Live]:
    """The shipped model, by the name of shipped, behind the server."""
    config = EngineConfig(**{"max_running_requests": 8, "threads": 1} | engine)
    running = Live(lambda observer: AsyncEngine.launch(None, config, "shipped"))
    running.start()
    try:
        assert running.ready.wait(60), running.error
        yield running
    finally:
        running.stop()
        running.join()
    assert running.error is None


def client_of(server: Live) -> openai.OpenAI:
    """The official client, without second tries."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
