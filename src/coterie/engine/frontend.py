"""AsyncEngine: the front end on an event loop. It checks, tokens come back as text, and it never computes.

The engine's thread (or process) hands over one batch of news per step; the event loop turns it into deltas for the
streams that wait. A stop string found here becomes an Abort. One event loop at a time may have requests open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from coterie.engine.admission import Door
from coterie.engine.build import EngineInfo, Progress, build_engine, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.errors import EngineDead, EngineRecovering
from coterie.engine.launch import ON_A_THREAD, Launch, RunSpec
from coterie.engine.messages import Drain, FromEngine, SamplingParams, ServiceClass, Stats, ToEngine
from coterie.engine.output import RequestOutput, RequestTimes
from coterie.engine.process import Hello, start_process
from coterie.engine.tracker import News, TrackedRequest, Tracker, collect, nobody_waits
from coterie.engine.worker import Closed, Deliver, EngineLink, start_thread
from coterie.kernels.select import Choice
from coterie.model.shipped import shipped_model_path
from coterie.observe.requests import RequestObserver
from coterie.spec.errors import CoterieError

T = TypeVar("T")
_log = logging.getLogger(__name__)

SILENCE_SECONDS = 120.0
"""A busy engine that says nothing for so long is taken for dead by `is_alive`."""


class Name(NamedTuple):
    """What a request is called and to which class it belongs; None is a fresh id, and the default class."""

    request_id: str | None = None
    service_class: ServiceClass | None = None


class RequestStream:
    """News of one request: a PromptInfo, then the deltas of its choices. Closing or dropping it aborts the request.

    Either `async for`: the request starts when the first news is asked for, and a cancelled `__anext__` loses nothing.
    Or, for readers of many streams, without a task for each: `start` it and `take` what there is whenever it wakes.
    """

    def __init__(self, engine: AsyncEngine, prompt_token_ids: list[int], params: SamplingParams, name: Name) -> None:
        self.request: TrackedRequest | None = None
        self._engine, self._prompt, self._params, self._name = engine, prompt_token_ids, params, name
        self._event = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> AsyncIterator[News]:
        return self

    async def __anext__(self) -> News:
        if self._closed:
            raise StopAsyncIteration
        if self.request is None:
            await self.start(self._event.set)
        request = self.request
        assert request is not None
        while not request.news:
            if request.failure is not None:
                raise EngineDead(request.failure)
            if request.is_finished:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()
        return request.news.popleft()

    async def start(self, wake: Callable[[], None]) -> None:
        """Start the request, once its grammar was tried. `wake` is called on the event loop whenever there is news, an
        end or a failure.

        Raises InvalidRequest, EngineBusy, EngineRecovering or EngineDead; then nothing runs.
        """
        await self._engine._try_grammar(self._params)
        self.request = self._engine._start(self._prompt, self._params, self._name, wake)

    def take(self) -> list[News]:
        """All news since the last call, in order; none after closing. Raises EngineDead once the engine is gone."""
        request = self.request
        assert request is not None, "the request has not started"
        if self._closed:
            return []
        if request.news:
            news = list(request.news)
            request.news.clear()
            return news
        if request.failure is not None:
            raise EngineDead(request.failure)
        return []

    @property
    def is_over(self) -> bool:
        """Whether all was taken and nothing more comes, not even a failure."""
        request = self.request
        return request is not None and request.is_finished and not request.news and request.failure is None

    @property
    def times(self) -> RequestTimes:
        """When it arrived, gave its first token and finished, as the engine stamped it. Only for a started request."""
        assert self.request is not None, "the request has not started"
        return self.request.times

    async def aclose(self) -> None:
        """Abort what still runs, once; no news come after it."""
        self._closed = True
        if self.request is not None:
            self._engine._cancel(self.request)

    def __del__(self) -> None:
        if self.request is not None and not self.request.is_finished:
            self._engine._cancel_from_anywhere(self.request)


class AsyncEngine:
    """One engine and its open requests. Make it with `launch`; `connect` is for other ways to run an engine."""

    def __init__(self, info: EngineInfo, model_name: str) -> None:
        self.model_name = model_name
        self.spec, self.tokenizer = info.files.spec, info.files.tokenizer
        self.config, self.service, self.max_model_len = info.config, info.service, info.max_model_len
        self.report: tuple[Choice, ...] = info.report
        self.load_lines = info.load_lines
        self._tracker = Tracker(Door.of(info), self.tokenizer, seed=self.config.seed)
        self._trials = ThreadPoolExecutor(1, thread_name_prefix="coterie-trial")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: EngineLink | None = None
        self._stats: Stats | None = None
        self._draining = False
        self._dead: str | None = None
        self._last_heard = time.monotonic()

    @classmethod
    def launch(
        cls,
        model_path: str | None,
        config: EngineConfig,
        served_model_name: str | None = None,
        run: RunSpec = ON_A_THREAD,
        *,
        progress: Progress | None = None,
    ) -> AsyncEngine:
        """Load a model (None: the shipped one) and start its engine on a thread, in a process of its own, or in one for
        each of several ranks.

        Blocks while loading; needs no event loop. Raises `CoterieError`.
        """
        path = model_path if model_path is not None else shipped_model_path()
        name = served_model_name or Path(path).resolve().name
        if not run.parallel.is_single:
            launch = Launch(path, config, run)
            engine = cls(launch.load(progress), name)
            engine.connect(launch.start(*engine.callbacks()))
        elif run.own_process:
            files = open_model(path, strict=config.strict)
            started = start_process(Hello(path, config, run.service), progress)
            ready = started.ready
            report = tuple(Choice(*line) for line in ready.report)
            info = EngineInfo(files, config, ready.max_model_len, report, tuple(ready.load_lines), run.service)
            engine = cls(info, name)
            engine.connect(started.listen(*engine.callbacks()))
        else:
            core, info = build_engine(path, config, progress, service=run.service)
            engine = cls(info, name)
            engine.connect(start_thread(core, *engine.callbacks()))
        return engine

    def callbacks(self) -> tuple[Deliver, Closed]:
        """What an engine calls, on its own thread: for news, and when it has ended (with a reason if it failed)."""
        return self._deliver, self._closed

    def connect(self, link: EngineLink) -> None:
        """Use this engine. Call once."""
        self._link = link

    @property
    def observer(self) -> RequestObserver:
        """Who is told of the requests' lives."""
        return self._tracker.observer

    @observer.setter
    def observer(self, observer: RequestObserver) -> None:
        self._tracker.observer = observer

    # Requests

    def stream(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        service_class: ServiceClass | None = None,
    ) -> RequestStream:
        """The news of a new request: `async for`, and close it.

        Its first `__anext__` starts it, or raises `InvalidRequest`, `EngineBusy` or `EngineDead`; then nothing runs.
        """
        return RequestStream(self, list(prompt_token_ids), params, Name(request_id, service_class))

    async def _try_grammar(self, params: SamplingParams) -> None:
        """Check a grammar that is new here beside the event loop, as it takes a while; then `_start` finds it known."""
        door = self._tracker.door
        if door.needs_trial(params):
            assert params.grammar is not None
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._trials, door.grammars.check, params.grammar)

    def _start(self, prompt: list[int], params: SamplingParams, name: Name, wake: Callable[[], None]) -> TrackedRequest:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._draining or self._link is None:
            raise EngineDead("the engine is shutting down and takes nothing new")
        if (reason := self._link.unavailable()) is not None:
            raise EngineRecovering(f"nothing new is taken just now: {reason}")
        self._bind()
        if not self._tracker.num_sequences:
            self._last_heard = time.monotonic()
        request, adds = self._tracker.admit(prompt, params, name.request_id, service_class=name.service_class)
        request.wake = wake
        try:
            for add in adds:
                self._link.send(add)
        except EngineDead:
            self._tracker.cancel(request)
            raise
        return request

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, *, request_id: str | None = None
    ) -> RequestOutput:
        """Run a request to its end. Cancelling the caller aborts it."""
        stream = self.stream(prompt_token_ids, params, request_id=request_id)
        news: list[News] = []
        try:
            async for one in stream:
                news.append(one)
        finally:
            await stream.aclose()
        assert stream.request is not None
        return collect(stream.request, news)

    def _bind(self) -> None:
        """Remember the event loop that news go to."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._tracker.num_sequences and self._loop is not None and not self._loop.is_closed():
                raise CoterieError("this engine has requests open on another event loop; use one loop per engine")
            self._abandon()
            self._loop = loop

    def _abandon(self) -> None:
        """Requests of a loop that was closed under them: nobody waits for them any more."""
        for request in self._tracker.requests:
            request.wake = nobody_waits
            self._cancel(request)

    def _cancel(self, request: TrackedRequest) -> None:
        for abort in self._tracker.cancel(request):
            self._send_if_alive(abort)

    def _cancel_from_anywhere(self, request: TrackedRequest) -> None:
        """A stream was dropped; the garbage collector may do that on any thread."""
        self._call(self._cancel, request)

    def _send_if_alive(self, message: ToEngine) -> None:
        """For what is moot once the engine has ended."""
        if self._link is not None and self._dead is None:
            try:
                self._link.send(message)
            except EngineDead:
                _log.debug("not sent, the engine has ended: %r", message)

    # State

    def stats(self) -> Stats | None:
        """The engine's last word on itself; None before its first step."""
        return self._stats

    @property
    def takes_grammars(self) -> bool:
        """Whether its tokenizer and end token can be held to a grammar."""
        return self._tracker.door.has_end

    def is_ready(self) -> bool:
        """Whether a request would be taken now, room in the queue aside."""
        if self._link is None or self._draining or self._dead is not None:
            return False
        return self.unavailable() is None

    def unavailable(self) -> str | None:
        """Why an engine of several ranks takes nothing new just now; None if it does."""
        return None if self._link is None else self._link.unavailable()

    def is_alive(self) -> bool:
        """Whether the engine runs and, if it has work, said something lately."""
        silent = time.monotonic() - self._last_heard > SILENCE_SECONDS
        return self._dead is None and not (silent and self._tracker.num_sequences)

    async def shutdown(self, *, drain: bool) -> None:
        """Take nothing new, finish (`drain`) or abort what runs, and wait until the engine has ended. Idempotent."""
        if self._link is None:
            return
        self._draining = True
        if not drain:
            for request in self._tracker.requests:
                self._cancel(request)
        self._send_if_alive(Drain())
        await asyncio.to_thread(self._link.join, None)
        self._trials.shutdown(wait=False, cancel_futures=True)
        self._tracker.door.grammars.close()
        await asyncio.sleep(0)  # the last news were queued before the end of the engine's thread
        self._dead = self._dead or "the engine was shut down"

    # News

    def _deliver(self, messages: list[FromEngine]) -> None:
        """On the engine's thread, where the news gets its time: the event loop may be behind."""
        self._last_heard = time.monotonic()
        self._call(self._take, (self._last_heard, messages))

    def _closed(self, reason: str | None) -> None:
        """On the engine's thread."""
        if reason is None and not self._draining:
            reason = "the engine has ended"
        self._dead = reason or "the engine was shut down"
        self._call(self._tracker.fail_all, self._dead)

    def _call(self, function: Callable[[T], object], argument: T) -> None:
        """Run on the event loop. Without an open one nobody waits for news; `_abandon` tidies up."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function, argument)
            except RuntimeError:
                _log.debug("news for a closed event loop were dropped")

    def _take(self, news: tuple[float, list[FromEngine]]) -> None:
        when, messages = news
        for message in messages:
            if isinstance(message, Stats):
                self._stats = message
                self._tracker.note_pace(message)
                continue
            abort = self._tracker.feed(message, when)
            if abort is not None:
                self._send_if_alive(abort)
