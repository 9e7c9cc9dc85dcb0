"""Generation: the running prompts of one HTTP request, read as one sequence of events, whoever ends it.

Three things can end it: the engine (all prompts finished, or one failed), the client (hang-up), the server (shutdown).
All three wake the one reader, with no task and no queue between, and there is
one place that cleans up. Closing aborts what still runs, nothing else does; what has finished is never aborted. Not
here: JSON, text, usage.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Receive

from coterie.engine.errors import InvalidRequest
from coterie.engine.messages import SamplingParams, ServiceClass
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.errors import ApiError, ClientGone, as_api_error, bad_request, internal_error, unavailable

if TYPE_CHECKING:
    from coterie.engine.frontend import AsyncEngine, RequestStream

logger = logging.getLogger("coterie.server")
_LENGTH = re.compile(r"\bmax_tokens\b")


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt to run. `text` is what an echo shows. `request_id` is the engine's name for it."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    text: str = ""


class Event(msgspec.Struct, frozen=True, gc=False):
    """News of prompt number `prompt`: first its PromptInfo, then its choices' deltas."""

    prompt: int
    value: PromptInfo | ChoiceDelta


class Generation:
    """Runs jobs on an engine. Use: `start`, then `next_events` until it returns None, and always `close`.

    names: what the client calls the engine's fields, where they differ. on_close: told when it is over.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        jobs: Sequence[PromptJob],
        names: Mapping[str, str],
        on_close: Callable[[Generation], None],
        service_class: ServiceClass | None = None,
    ) -> None:
        self.jobs = tuple(jobs)
        self.engine = engine
        self._names = names
        self._on_close = on_close
        self._class = service_class
        self._streams: list[RequestStream] = []
        self._open: dict[int, RequestStream] = {}
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._starting = len(self.jobs)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, receive: Receive) -> None:
        """Begin to start every job and to watch the connection. A job that is refused fails the generation."""
        self._tasks = [asyncio.create_task(self._start_all()), asyncio.create_task(self._watch(receive))]

    async def next_events(self, timeout: float | None = None) -> list[Event] | None:
        """All news since the last call, waiting for some; [] after `timeout` seconds without, None at the end.

        Raises ApiError if a prompt failed (news that came before are shown first), ClientGone if the client hung up.
        """
        while self._failure is None:
            events = self._taken()
            if events:
                return events
            if self._failure is not None:
                break
            if not self._open and not self._starting:
                return None
            if not await self._wait(timeout):
                return []
        raise self._failure

    def stop(self, reason: str) -> None:
        """End it from the server's side: its reader gets a 503."""
        self._fail(unavailable(reason, retry_after=5, code="shutting_down"))

    async def close(self) -> None:
        """Abort what still runs and let go of the connection. Idempotent."""
        self._on_close(self)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        # A closed stream aborts what has not finished; one that has is left alone by the engine.
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_all(self) -> None:
        for index, job in enumerate(self.jobs):
            stream = self.engine.stream(
                job.token_ids, job.params, request_id=job.request_id, service_class=self._class
            )
            self._streams.append(stream)
            try:
                await stream.start(self._wake)
            except Exception as raised:
                self._fail(self._translated(raised, index))
                return
            self._open[index] = stream
            self._starting -= 1

    def _taken(self) -> list[Event]:
        """What the open streams have to say; a failure is kept for the next call."""
        events: list[Event] = []
        for index, stream in list(self._open.items()):
            try:
                news = stream.take()
            except Exception as raised:
                self._failure = self._translated(raised, index)
                return events
            for value in news:
                if isinstance(value, ChoiceDelta) and (failure := _failure(value)):
                    self._failure = failure
                    return events
                events.append(Event(index, value))
            if stream.is_over:
                del self._open[index]
        return events

    async def _wait(self, timeout: float | None) -> bool:
        """Wait to be woken; False after `timeout` seconds. One timer serves all waits: it is put off, not made anew."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if timeout is not None:
            self._deadline = loop.time() + timeout
            if self._timer is None:
                self._timer = loop.call_at(self._deadline, self._tick)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _tick(self) -> None:
        """The timer went off: the wait is over, or it began anew meanwhile."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() >= self._deadline:
            self._waiter.set_result(False)
        else:
            self._timer = loop.call_at(self._deadline, self._tick)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._wake()

    def _translated(self, raised: Exception, index: int) -> Exception:
        """An engine's error as the client hears of it."""
        if isinstance(raised, InvalidRequest):
            # A message about the context names the length too, whatever its own field is.
            message = _LENGTH.sub(self._names.get("max_tokens", "max_tokens"), str(raised))
            return bad_request(message, param=self._names.get(raised.param, raised.param))
        error = as_api_error(raised)
        if error is None:
            logger.error("request %s failed", self.jobs[index].request_id, exc_info=raised)
            error = internal_error()
        return error

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(ClientGone())


def _failure(delta: ChoiceDelta) -> ApiError | None:
    """A choice that ended without being finished makes the whole request fail."""
    if delta.finish_reason == "error" and delta.retry_after is not None:
        return unavailable(delta.error or "a part of the engine was lost", delta.retry_after, code="rank_lost")
    if delta.finish_reason == "error":
        return internal_error(delta.error or "the engine failed on this request")
    if delta.finish_reason == "abort":
        return unavailable(delta.error or "the engine stopped this request", retry_after=5, code="aborted")
    return None
