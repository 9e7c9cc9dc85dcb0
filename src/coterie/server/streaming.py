"""Server-sent events: a Generation written to the client as it comes, with usage as asked, pings and one clean end.

The status line waits for the first news, so that an error before it is a proper HTTP error; after `ping_seconds`
without news the headers go out and comments keep proxies from closing. A failure later is one error event and no
[DONE]. Not here: what a chunk holds (the writers in `server.chat` and `server.completions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from coterie.server.errors import ApiError, ClientGone, Fault
from coterie.server.generation import Event, Generation
from coterie.server.protocol import SamplingFields
from coterie.server.turns import PIECE_BYTES, Turn

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every answer and chunk of one request carries, and how usage is wanted in a stream."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    continuous_usage: bool = False
    service_tier: str | UnsetType = UNSET


def usage_wanted(request: SamplingFields) -> tuple[bool, bool]:
    """(usage in a last chunk, usage so far in every chunk)."""
    options = request.stream_options
    if options is None:
        return False, False
    continuous = bool(options.continuous_usage_stats)
    return bool(options.include_usage) or continuous, continuous


class Tally:
    """Counts the tokens of one request: each prompt once, whatever n is."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._cached = 0
        self._completion = 0
        self.reasoning = 0  # how many of the completion's tokens; set by whoever can tell

    def add(self, event: Event) -> None:
        """Count an event's tokens."""
        if isinstance(event.value, PromptInfo):
            self._cached += event.value.num_cached_tokens
        else:
            self._completion += len(event.value.token_ids)

    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached),
            completion_tokens_details=CompletionTokensDetails(self.reasoning),
        )


class StreamWriter:
    """Turns events into chunks. A subclass says what a choice's news looks like and how a chunk is built."""

    def __init__(self, envelope: Envelope, prompt_tokens: int) -> None:
        self.envelope = envelope
        self.tally = Tally(prompt_tokens)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def prompt(self, index: int, info: PromptInfo) -> Iterable[Struct | None]:
        """Chunks that open the choices of a prompt; None after a piece of the work towards a big one."""
        raise NotImplementedError

    def delta(self, index: int, delta: ChoiceDelta) -> list[Struct]:
        """Chunks for news of a choice."""
        raise NotImplementedError

    def plain(self, index: int, delta: ChoiceDelta) -> bytes | None:
        """News of a choice as an event, where it is the same as that of `delta` but faster made (`text_event`)."""
        return None

    def last(self, usage: Usage) -> Struct:
        """The chunk without choices that carries the totals."""
        raise NotImplementedError

    def chunk_usage(self) -> Usage | UnsetType | None:
        """The `usage` of a chunk with choices: absent, null or the counts so far, as asked."""
        if self.envelope.continuous_usage:
            return self.tally.usage()
        return None if self.envelope.include_usage else UNSET

    def text_event(self, index: int, text: str, make: Callable[[int, str], Struct]) -> bytes:
        """The event of `make(index, text)`, encoded once for each index: chunks of plain text differ in the text alone.

        Not for chunks that carry the usage so far.
        """
        around = self._around.get(index)
        if around is None:
            before, after = self.frame(make(index, _MARK)).split(_ENCODER.encode(_MARK))
            around = self._around[index] = (before, after)
        return around[0] + _ENCODER.encode(text) + around[1]

    def write(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Events as server-sent events; empty after a piece of the work towards a big one."""
        for event in events:
            self.tally.add(event)
            value = event.value
            if isinstance(value, PromptInfo):
                for chunk in self.prompt(event.prompt, value):
                    yield b"" if chunk is None else self.frame(chunk)
            elif (made := self.plain(event.prompt, value)) is not None:
                yield made
            else:
                yield from map(self.frame, self.delta(event.prompt, value))

    def end(self) -> bytes:
        """What follows the last news."""
        return (self.frame(self.last(self.tally.usage())) if self.envelope.include_usage else b"") + DONE

    def frame(self, chunk: Struct) -> bytes:
        """One server-sent event."""
        return frame(chunk)

    def failure(self, fault: Fault) -> bytes:
        """What a stream that fails ends with."""
        return b"data: %b\n\n" % fault.body()


_ENCODER = msgspec.json.Encoder()
_MARK = "\0"
"""Stands for the text where a chunk is cut; in no name or id."""


def frame(chunk: Struct) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


class EventStream(Response):
    """The streamed answer. `first` are the events that came before the headers."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: StreamWriter, first: list[Event], ping_seconds: float) -> None:
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._writer = writer
        self._first = first
        self._ping_seconds = ping_seconds
        self.init_headers({
            "Cache-Control": "no-cache", "X-Accel-Buffering": "no", "x-request-id": writer.envelope.id,
        })  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            events: list[Event] | None = self._first
            turn = Turn()
            while events is not None:
                await self._send(events, turn, send)
                events = await self._generation.next_events(self._ping_seconds)
            await send({"type": "http.response.body", "body": self._writer.end(), "more_body": False})
        except ApiError as error:
            body = self._writer.failure(error.fault)
            await send({"type": "http.response.body", "body": body, "more_body": False})
        except ClientGone:
            pass
        finally:
            await self._generation.close()

    async def _send(self, events: list[Event], turn: Turn, send: Send) -> None:
        """Send what came together as one body, unless it is so much that others would wait for it."""
        frames: list[bytes] = [] if events else [PING]
        for frame in self._writer.write(events):
            frames.append(frame)
            if turn.spend(len(frame) or PIECE_BYTES):
                await _send_body(frames, send)
                frames.clear()
                await turn.give()
        await _send_body(frames, send)


async def _send_body(frames: list[bytes], send: Send) -> None:
    if data := b"".join(frames):
        await send({"type": "http.response.body", "body": data, "more_body": True})
