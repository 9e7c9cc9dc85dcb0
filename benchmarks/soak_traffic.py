"""The soak's clients: kinds of requests, each with what must come back, and a ledger of what did.

Prompts are real text, token ids where the number of tokens must be known without an answer. A request that ends in any
way its kind does not allow is unexpected. Not here: the server, arrivals, what the counters must say (`soak.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coterie.loadgen.client import CHAT, TEXT, Client, Record
from coterie.loadgen.connection import BadAnswer

HANG_UP_TOKENS = 37
"""Prompt of requests that hang up before an answer: all alike, so that the sum tells how many the engine saw."""
SCHEMA = {
    "type": "object", "properties": {"speaker": {"enum": ["king", "queen", "fool"]}, "true": {"type": "boolean"}},
    "required": ["speaker", "true"], "additionalProperties": False,
}  # fmt: skip
REFUSALS: tuple[tuple[str, bytes, int], ...] = (
    (TEXT, b'{"prompt": "a", ', 400),
    (TEXT, b'{"prompt": "a", "temperature": -1}', 400),
    (TEXT, b'{"prompt": "a", "max_tokens": 1e400}', 400),
    (TEXT, b'{"max_tokens": 3}', 400),
    (TEXT, b'{"prompt": "a", "model": "another"}', 404),
    (TEXT, b'{"prompt": [99999999]}', 400),
    (TEXT, b'{"prompt": "a", "n": 1000000}', 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 99999999}', 400),
    (CHAT, b"[" * 5000, 400),
)


@dataclass(slots=True)
class Ledger:
    """What the clients saw. `statuses`: answers by (path, status); `reasons` and tokens: of whole answers.

    hidden: answers that nobody waited for, by path: their status is not known. `seen_prompt` and `seen_output`: tokens
    that clients who hung up in a stream had been told of; `may_follow`: tokens that may have come after they did.
    """

    sent: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    hung_up: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    seen_prompt: int = 0
    seen_output: int = 0
    may_follow: int = 0
    streams_left: int = 0
    texts: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, what: str) -> None:
        """Something that must not happen."""
        self.unexpected.append(f"{kind}: {what}"[:300])

    def count(self, kind: str, reasons: list[str], prompt: int, output: int) -> None:
        """A whole answer. A request of several choices ends for the worst of their reasons."""
        self.whole[kind] += 1
        self.reasons["length" if "length" in reasons else "stop"] += 1
        self.prompt_tokens += prompt
        self.output_tokens += output

    def same_text(self, kind: str, question: str, text: str) -> None:
        """Greedy answers to one question are one text, whatever ran beside it."""
        if self.texts.setdefault(question, text) != text:
            self.note(kind, f"the answer to {question[:60]!r} changed")


class Traffic:
    """Sends one request of a kind. Everything random comes from one seed."""

    def __init__(self, client: Client, text: str, context: int, seed: int) -> None:
        self.client, self.ledger = client, Ledger()
        self._text, self._context = text, context
        self._random = random.Random(seed)
        self._questions = [self._piece(40 + 20 * i) for i in range(12)]
        self._prefixes = [self._piece(2 * context) for _ in range(3)]
        self.kinds: dict[str, tuple[float, Callable[[str], Awaitable[None]]]] = {
            "chat stream": (4, self._chat),
            "shared prefix": (3, self._shared),
            "whole, several choices": (2, self._whole),
            "long prompt": (1, self._long),
            "schema": (1, self._schema),
            "hang up in stream": (2, self._leave_stream),
            "hang up before answer": (1, self._leave_early),
            "bad request": (2, self._bad),
        }

    async def one(self) -> None:
        """A request of a kind drawn by weight."""
        names = list(self.kinds)
        kind = self._random.choices(names, [self.kinds[name][0] for name in names])[0]
        await self.send(kind)

    async def send(self, kind: str) -> None:
        """A request of this kind, its end filed."""
        self.ledger.sent[kind] += 1
        try:
            await self.kinds[kind][1](kind)
        except (OSError, BadAnswer) as error:
            self.ledger.note(kind, f"{type(error).__name__}: {error}")

    def _piece(self, chars: int) -> str:
        start = self._random.randrange(len(self._text) - chars)
        return self._text[start : start + chars]

    # Kinds

    async def _chat(self, kind: str) -> None:
        question = self._random.choice(self._questions)
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
        record = await self._stream(kind, CHAT, body)
        if record.ok:
            self.ledger.same_text(kind, "chat " + question, record.text)

    async def _shared(self, kind: str) -> None:
        prompt = self._random.choice(self._prefixes) + self._piece(20)
        await self._stream(kind, TEXT, {"prompt": prompt, "max_tokens": self._random.randrange(1, 40)})

    async def _long(self, kind: str) -> None:
        start = self._random.randrange(1000)
        ids = [(start + 7 * i) % 500 for i in range(self._context - 24)]
        await self._stream(kind, TEXT, {"prompt": ids, "max_tokens": 16, "ignore_eos": True})

    async def _schema(self, kind: str) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "line", "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": self._piece(60)}], "max_tokens": 60, "response_format": wanted}
        record = await self._stream(kind, CHAT, body)
        if record.ok and record.finish_reason == "stop":
            try:
                fits = json.loads(record.text).keys() == {"speaker", "true"}
            except (ValueError, AttributeError):
                fits = False
            if not fits:
                self.ledger.note(kind, f"the answer does not fit the schema: {record.text!r}")

    async def _whole(self, kind: str) -> None:
        question, n = self._random.choice(self._questions), self._random.randrange(1, 4)
        body = {"prompt": question, "max_tokens": 12, "n": n, "temperature": 0 if n == 1 else 1}
        status, answer = await self.client.ask("POST", TEXT, body)
        self.ledger.statuses[TEXT, status] += 1
        if self._was_refused(kind, status, answer):
            return
        found = json.loads(answer)
        usage = found["usage"]
        reasons = [choice["finish_reason"] for choice in found["choices"]]
        if len(reasons) != n:
            self.ledger.note(kind, f"{len(reasons)} choices instead of {n}")
        self.ledger.count(kind, reasons, usage["prompt_tokens"], usage["completion_tokens"])
        if n == 1:
            self.ledger.same_text(kind, "text " + question, found["choices"][0]["text"])

    async def _bad(self, kind: str) -> None:
        path, body, wanted = self._random.choice(REFUSALS)
        parts: list[bytes] = []
        head = await self.client.pool.request("POST", path, body, lambda head: lambda piece, stamp: parts.append(piece))
        self.ledger.statuses[path, head.status] += 1
        if head.status == wanted:
            self.ledger.refused[kind] += 1
        else:
            self.ledger.note(kind, f"{body[:60]!r} was answered {head.status}, not {wanted}: {b''.join(parts)[:200]!r}")

    async def _leave_stream(self, kind: str) -> None:
        """Hang up after some news: by then the status is known, and the last usage is what had been said."""
        leave_after, max_tokens = self._random.randrange(1, 12), 64
        record = Record(0, 0.0)
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": self._piece(80), "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
                "stream_options": options}  # fmt: skip

        def watch(record: Record) -> None:
            if len(record.news) >= leave_after:
                task.cancel()

        task = asyncio.ensure_future(self.client.stream_body(TEXT, msgspec.json.encode(body), record, watch))
        await asyncio.wait({task})
        if not task.cancelled():
            self._settle(kind, TEXT, record)
            return
        self.ledger.statuses[TEXT, 200] += 1
        self.ledger.hung_up[kind] += 1
        self.ledger.streams_left += 1
        self.ledger.seen_prompt += record.prompt_tokens
        self.ledger.seen_output += record.output_tokens
        self.ledger.may_follow += max_tokens - record.output_tokens

    async def _leave_early(self, kind: str) -> None:
        """Hang up without reading anything; what was answered, if anything, and what the engine did is not known."""
        address = self.client.pool.address
        body = msgspec.json.encode({"prompt": [7] * HANG_UP_TOKENS, "max_tokens": 200, "ignore_eos": True})
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {address.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(self._random.uniform(0.005, 0.1))
        writer.close()
        self.ledger.hidden[TEXT] += 1
        self.ledger.hung_up[kind] += 1
        self.ledger.may_follow += 200

    # What came back

    async def _stream(self, kind: str, path: str, body: dict[str, Any]) -> Record:
        record = Record(0, 0.0)
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        await self.client.stream_body(path, msgspec.json.encode(asked), record)
        self._settle(kind, path, record)
        return record

    def _settle(self, kind: str, path: str, record: Record) -> None:
        """File a stream that ended by itself. A full queue is an answer like any other."""
        if record.ok:
            self.ledger.statuses[path, 200] += 1
            self.ledger.count(kind, [record.finish_reason or "none"], record.prompt_tokens, record.output_tokens)
            if record.finish_reason not in ("stop", "length") or not record.counted:
                self.ledger.note(kind, f"ended for {record.finish_reason}, usage: {record.counted}")
        elif record.error == "HTTP 429":
            self.ledger.statuses[path, 429] += 1
            self.ledger.refused[kind] += 1
        else:
            self.ledger.note(kind, f"{record.error}: {record.said}")

    def _was_refused(self, kind: str, status: int, answer: bytes) -> bool:
        if status == 429:
            self.ledger.refused[kind] += 1
        elif status != 200:
            self.ledger.note(kind, f"answered {status}: {answer[:200]!r}")
        return status != 200
