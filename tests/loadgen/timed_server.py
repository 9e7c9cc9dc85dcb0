"""A server that speaks OpenAI's streams by a timetable and writes down when it really sent each piece.

On a thread of its own with its own event loop; times are of the monotonic clock, which client and server share.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

MODELS = b'{"data": [{"id": "timed"}]}'


@dataclass
class Seen:
    """One request: when its body was complete and when each piece of text left."""

    body: dict[str, Any]
    path: str
    headers: dict[str, str]
    came: float
    sent: list[float] = field(default_factory=list)


Behaviour = Callable[["TimedServer", Seen, asyncio.StreamWriter], Awaitable[None]]


def event(value: Any) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}], "usage": None}


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def head(kind: str = "text/event-stream", status: str = "200 OK", length: int | None = None) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()


def timetable(gaps: list[float], *, prompt: int = 7, tokens: int | None = None, counted: bool = True) -> Behaviour:
    """Wait gaps[0], send a piece, wait gaps[1], ...; then usage (`tokens` of output) and the end."""

    async def behave(server: TimedServer, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        for number, gap in enumerate(gaps):
            await asyncio.sleep(gap)
            seen.sent.append(time.monotonic())
            writer.write(event(text(f"w{number} ")))
            await writer.drain()
        ends = [usage(prompt, len(gaps) if tokens is None else tokens)] if counted else []
        writer.write(b"".join(map(event, ends)) + event(b"[DONE]") + b"0\r\n\r\n")

    return behave


def whole(status: str, body: bytes) -> Behaviour:
    """Answer at once with a status and a JSON body."""

    async def behave(server: TimedServer, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head("application/json", status, len(body)) + body)

    return behave


def raw(data: bytes) -> Behaviour:
    """Send bytes and hang up."""

    async def behave(server: TimedServer, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return behave


class TimedServer:
    """`behaviours` are used in turn, the last one for all that follow."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self.behaviours = list(behaviours)
        self.seen: list[Seen] = []
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> TimedServer:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    writer.write(head("application/json", length=len(MODELS)) + MODELS)
                    continue
                seen = Seen(json.loads(body), path, headers, time.monotonic())
                if path == "/tokenize":
                    answer = json.dumps({"count": len(seen.body["prompt"]) // 5}).encode()
                    writer.write(head("application/json", length=len(answer)) + answer)
                    continue
                behaviour = self.behaviours[min(len(self.seen), len(self.behaviours) - 1)]
                self.seen.append(seen)
                await behaviour(self, seen, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
