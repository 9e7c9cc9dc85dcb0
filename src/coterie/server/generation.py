"""Generation: the running prompts of one HTTP request, read as one sequence of events, whoever ends it.

Three things can end it: the engine (all prompts finished, or one failed), the client (hang-up), the server (shutdown).
All three arrive in one queue, so there is one reader and one place that cleans up. Closing aborts what still runs,
nothing else does; what has finished is never aborted. Not here: JSON, text, usage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Receive

from coterie.engine.errors import InvalidRequest
from coterie.engine.messages import SamplingParams
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.errors import ApiError, ClientGone, as_api_error, bad_request, internal_error, unavailable

if TYPE_CHECKING:
    from coterie.engine.frontend import AsyncEngine, RequestStream

logger = logging.getLogger("coterie.server")


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt to run. `text` is what an echo shows. `request_id` is the engine's name for it."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    text: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """News of prompt number `prompt`: first its PromptInfo, then its choices' deltas."""

    prompt: int
    value: PromptInfo | ChoiceDelta


@dataclass(frozen=True, slots=True)
class _Ended:
    """A prompt came to its end; `error` says why if it was no good one."""

    error: Exception | None = None


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
    ) -> None:
        self.jobs = tuple(jobs)
        self._engine = engine
        self._names = names
        self._on_close = on_close
        self._queue: asyncio.Queue[Event | _Ended] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[RequestStream] = []
        self._running = len(self.jobs)
        self._failure: Exception | None = None

    def start(self, receive: Receive) -> None:
        """Begin to read every job's news, which starts it, and to watch the connection."""
        for job in self.jobs:
            self._streams.append(self._engine.stream(job.token_ids, job.params, request_id=job.request_id))
        self._tasks = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(self._streams)]
        self._tasks.append(asyncio.create_task(self._watch(receive)))

    async def next_events(self, timeout: float | None = None) -> list[Event] | None:
        """All news since the last call, waiting for some; [] after `timeout` seconds without, None at the end.

        Raises ApiError if a prompt failed, ClientGone if the client hung up.
        """
        if self._failure is not None:
            raise self._failure
        if not self._running:
            return None
        try:
            async with asyncio.timeout(timeout):
                item = await self._queue.get()
        except TimeoutError:
            return []
        events = []
        while True:
            if isinstance(item, Event):
                events.append(item)
            elif item.error is None:
                self._running -= 1
            else:
                self._failure = item.error
            if not self._running or self._failure is not None or self._queue.empty():
                break
            item = self._queue.get_nowait()
        # News that came before a failure is shown first; the next call raises.
        return events or await self.next_events(timeout)

    def stop(self, reason: str) -> None:
        """End it from the server's side: its reader gets a 503."""
        self._queue.put_nowait(_Ended(unavailable(reason, retry_after=5, code="shutting_down")))

    async def close(self) -> None:
        """Abort what still runs and let go of the connection. Idempotent."""
        self._on_close(self)
        # A closed stream aborts what has not finished; one that has is left alone by the engine.
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, stream: RequestStream) -> None:
        """Read one prompt's news to their end."""
        error: Exception | None = None
        try:
            async for value in stream:
                if isinstance(value, ChoiceDelta) and (failure := _failure(value)):
                    error = failure
                    break
                self._queue.put_nowait(Event(index, value))
        except InvalidRequest as refused:
            error = bad_request(str(refused), param=self._names.get(refused.param, refused.param))
        except Exception as raised:
            error = as_api_error(raised)
            if error is None:
                logger.exception("request %s failed", self.jobs[index].request_id)
                error = internal_error()
        self._queue.put_nowait(_Ended(error))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(_Ended(ClientGone()))


def _failure(delta: ChoiceDelta) -> ApiError | None:
    """A choice that ended without being finished makes the whole request fail."""
    if delta.finish_reason == "error":
        return internal_error(delta.error or "the engine failed on this request")
    if delta.finish_reason == "abort":
        return unavailable(delta.error or "the engine stopped this request", retry_after=5, code="aborted")
    return None
