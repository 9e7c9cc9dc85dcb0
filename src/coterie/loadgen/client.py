"""One streamed request to an OpenAI-compatible server, and the record of what its user saw and when.

News is a chunk that shows something: text, reasoning, a tool call or log-probabilities; the role chunk and the usage
chunk are none. Tokens are those of `usage`, which every request asks for; of a server that sends none the pieces of
news are counted, and the record says so. Not here: when requests are sent (`loadgen.run`), statistics (`report`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coterie.loadgen.connection import Address, BadAnswer, Cut, Head, Pool, Sink
from coterie.spec.errors import CoterieError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: Any = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Record:
    """One request. Times are of the monotonic clock; `news`: when something was shown, the first is the first token.

    due: when it should have been sent. error: a short kind ("HTTP 429", "cut", ...), None if all went well; `said` is
    what the server said. `cancelled`: ended by us. `counted`: tokens are of `usage`.
    """

    index: int
    due: float
    sent: float = 0.0
    end: float = 0.0
    news: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None
    said: str = ""
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        """Whether the answer came to its proper end."""
        return self.error is None and not self.cancelled

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first news."""
        return self.news[0] - self.sent if self.news else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for fewer than two tokens."""
        if not self.news or self.output_tokens < 2:
            return None
        return (self.news[-1] - self.news[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of news."""
        return [after - before for before, after in zip(self.news, self.news[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to ask: a text or token ids (completions only), and how many tokens to answer."""

    content: str | list[int]
    output_len: int


class Client:
    """A server, a model on it and what every request to it says beside the prompt."""

    def __init__(
        self, address: Address, *, api_key: str | None = None, headers: Mapping[str, str] | None = None,
        endpoint: str = TEXT, model: str | None = None, extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        auth = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.pool = Pool(address, auth | dict(headers or {}))
        self.endpoint, self.model = endpoint, model
        self._extra = dict(extra or {})

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        return self.endpoint.endswith("/chat/completions")

    def body(self, prompt: Prompt) -> bytes:
        """The JSON of a streamed request."""
        asked: dict[str, Any] = {} if self.model is None else {"model": self.model}
        if self.is_chat:
            if not isinstance(prompt.content, str):
                raise CoterieError("token ids cannot be sent as a chat; use the endpoint /v1/completions")
            asked["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            asked["prompt"] = prompt.content
        asked |= {"max_tokens": prompt.output_len, "stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(asked | self._extra)

    async def stream(self, prompt: Prompt, record: Record, watch: Callable[[Record], None] | None = None) -> None:
        """Send a request and fill its record; failures are filed, not raised. `watch` hears of each news."""
        await self.stream_body(self.endpoint, self.body(prompt), record, watch)

    async def stream_body(
        self, path: str, body: bytes, record: Record, watch: Callable[[Record], None] | None = None
    ) -> None:
        """`stream` with a body of one's own, which must ask for a stream."""
        answer = _Answer(record, watch)
        record.sent = time.monotonic()
        try:
            await self.pool.request("POST", path, body, answer.choose)
        except BadAnswer as error:
            answer.fail("no HTTP", str(error))
        except Cut as error:
            answer.fail("cut", str(error))
        except OSError as error:
            answer.fail("no connection", str(error))
        finally:
            record.end = record.end or time.monotonic()
            answer.settle()
        answer.judge()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """A plain request: status and body. Raises OSError or BadAnswer."""
        parts: list[bytes] = []
        data = b"" if body is None else msgspec.json.encode(body)
        head = await self.pool.request(method, path, data, lambda head: lambda piece, stamp: parts.append(piece))
        return head.status, b"".join(parts)

    async def find_model(self) -> str:
        """The first model that the server lists. Raises CoterieError."""
        where = f"{self.pool.address.url}/v1/models"
        try:
            status, body = await self.ask("GET", "/v1/models")
        except (OSError, BadAnswer) as error:
            raise CoterieError(f"no server answers at {where} ({error}); start one with coterie serve") from error
        if status != 200:
            raise CoterieError(f"{where} answered {status}: {said(body)}")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise CoterieError(f"{where} lists no model; is it an OpenAI-compatible server?") from error


class _Answer:
    """Reads one answer's bytes into its record."""

    def __init__(self, record: Record, watch: Callable[[Record], None] | None) -> None:
        self._record, self._watch = record, watch
        self._rest = b""
        self._whole: list[bytes] = []
        self._texts: list[str] = []
        self._status = 0
        self._streamed = self._done = False

    def choose(self, head: Head) -> Sink:
        """Where the body goes: events of a stream, or the text of an error."""
        self._status = head.status
        self._streamed = head.headers.get("content-type", "").startswith("text/event-stream")
        if head.status == 200 and self._streamed:
            return self._events
        return lambda piece, stamp: self._whole.append(piece)

    def fail(self, kind: str, message: str) -> None:
        """File the first thing that went wrong."""
        if self._record.error is None:
            self._record.error, self._record.said = kind, " ".join(message.split())[:500]

    def settle(self) -> None:
        """No more comes, whatever the reason: text and token count."""
        self._record.text = "".join(self._texts)
        if not self._record.counted:
            self._record.output_tokens = len(self._record.news)

    def judge(self) -> None:
        """The exchange is over: was it a whole answer?"""
        record = self._record
        if record.error is None and self._status != 200:
            self.fail(f"HTTP {self._status}", said(b"".join(self._whole)))
        elif record.error is None and not self._streamed:
            self.fail("no stream", "the server did not answer with text/event-stream")
        elif record.error is None and not self._done:
            self.fail("cut", "the stream ended without [DONE]")

    def _events(self, piece: bytes, stamp: float) -> None:
        data = (self._rest + piece).replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), stamp)

    def _event(self, data: bytes, stamp: float) -> None:
        record = self._record
        if data == b"[DONE]":
            self._done, record.end = True, stamp
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self.fail("bad event", f"{error}: {data[:200]!r}")
            return
        if chunk.error is not None:
            self.fail("error event", said(data))
            return
        if chunk.usage is not None:
            record.prompt_tokens = chunk.usage.prompt_tokens
            record.output_tokens = chunk.usage.completion_tokens or 0
            record.counted = True
        shows = False
        for choice in chunk.choices:
            record.finish_reason = choice.finish_reason or record.finish_reason
            shown = _shown(choice)
            self._texts.append(shown)
            shows = shows or bool(shown) or choice.logprobs is not None or _calls(choice)
        if shows:
            record.news.append(stamp)
            if self._watch is not None:
                self._watch(record)


def _shown(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return (choice.delta.reasoning_content or choice.delta.reasoning or "") + (choice.delta.content or "")


def _calls(choice: _Choice) -> bool:
    return choice.delta is not None and choice.delta.tool_calls is not None


def said(body: bytes) -> str:
    """The message of an OpenAI error body, or the body's beginning."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
