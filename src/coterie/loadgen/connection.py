"""A keep-alive HTTP/1.1 client on asyncio: one exchange at a time on a connection, bytes of the body as they come.

Every piece of a body carries the monotonic time at which it was read from the socket, before anything else happened to
it. No redirects, no compression, no proxies. Not here: JSON and server-sent events (`loadgen.client`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ssl import SSLContext, create_default_context
from urllib.parse import urlsplit

from coterie.spec.errors import CoterieError

Sink = Callable[[bytes, float], None]
"""Takes a piece of a body and the monotonic time at which it came."""

LONGEST_HEAD = 1 << 16


class Cut(ConnectionError):
    """The connection ended before the answer did. `stale`: an idle connection that had been closed by the server."""

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class BadAnswer(Exception):
    """What came back is not HTTP."""


@dataclass(slots=True)
class Head:
    """Status line and headers (names in lower case)."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)


class Connection(asyncio.Protocol):
    """`exchange` sends a request and hands the body's pieces to a sink until the answer is complete."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._done: asyncio.Future[None] | None = None
        self._choose: Callable[[Head], Sink] = _nobody
        self._sink: Sink = _ignore
        self._parse: Callable[[float], bool] = self._read_head
        self._left = 0
        self._used = False
        self._closed = False

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow."""
        return not self._closed and self._done is None

    async def exchange(self, request: bytes, choose: Callable[[Head], Sink]) -> Head:
        """Send `request` and read the whole answer; `choose` says where its body goes.

        Raises Cut or BadAnswer; a connection that failed, or whose exchange was cancelled, is closed.
        """
        assert self._transport is not None and self._done is None
        self.head, self._choose, self._parse = None, choose, self._read_head
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None
        self._used = True
        assert self.head is not None
        if self.head.headers.get("connection", "").lower() == "close":
            self.close()
        return self.head

    def close(self) -> None:
        """Let go of the socket at once."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        stamp = time.monotonic()
        self._buffer += data
        try:
            while self._done is not None and not self._done.done() and self._parse(stamp):
                pass
        except BadAnswer as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._parse == self._read_to_end and self.head is not None and exc is None:
            self._end(None)
        else:
            stale = self._used and self.head is None and not self._buffer
            self._end(Cut(f"the server closed the connection{f': {exc}' if exc else ''}", stale=stale))

    def _end(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    # The parser: each step returns whether there may be more to do with what is in the buffer

    def _read_head(self, stamp: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > LONGEST_HEAD:
                raise BadAnswer("the answer's head does not end")
            return False
        head = parse_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        if head.status < 200:
            return True
        self.head, self._sink = head, self._choose(head)
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            self._parse = self._read_size
        elif "content-length" in head.headers or head.status in (204, 304):
            self._left = whole_number(head.headers.get("content-length", "0"), 10)
            self._parse = self._read_length
        else:
            self._parse = self._read_to_end
        return True

    def _read_length(self, stamp: float) -> bool:
        self._hand_over(stamp)
        if not self._left:
            self._end(None)
        return False

    def _read_to_end(self, stamp: float) -> bool:
        self._left = len(self._buffer)
        self._hand_over(stamp)
        return False

    def _read_size(self, stamp: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        self._left = whole_number(self._buffer[:end].split(b";")[0].decode("latin-1"), 16)
        del self._buffer[: end + 2]
        self._parse = self._read_chunk if self._left else self._read_trailer
        return True

    def _read_chunk(self, stamp: float) -> bool:
        self._hand_over(stamp)
        if self._left or len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise BadAnswer("a chunk does not end where it says")
        del self._buffer[:2]
        self._parse = self._read_size
        return True

    def _read_trailer(self, stamp: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        del self._buffer[: end + 2]
        if end == 0:
            self._end(None)
        return end > 0

    def _hand_over(self, stamp: float) -> None:
        piece = bytes(self._buffer[: self._left])
        if piece:
            del self._buffer[: len(piece)]
            self._left -= len(piece)
            self._sink(piece, stamp)


def _ignore(piece: bytes, stamp: float) -> None:
    """A sink for what nobody reads."""


def _nobody(head: Head) -> Sink:
    """Where the body of an answer goes that nobody waits for."""
    return _ignore


def parse_head(data: bytes) -> Head:
    """Status and headers of an answer. Raises BadAnswer."""
    lines = data.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
        raise BadAnswer(f"the answer does not begin like HTTP: {lines[0][:80]!r}")
    fields = (line.partition(":") for line in lines[1:])
    return Head(int(parts[1]), {name.strip().lower(): value.strip() for name, _, value in fields})


def whole_number(text: str, base: int) -> int:
    """A length on the wire. Raises BadAnswer."""
    try:
        value = int(text, base)
    except ValueError:
        value = -1
    if value < 0:
        raise BadAnswer(f"{text[:40]!r} is no length")
    return value


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens and what every request to it carries. `prefix`: path before the routes, without /v1."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """From http://host:port, with or without /v1. Raises CoterieError."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise CoterieError(f"{url!r} is not a URL of a server: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CoterieError(f"{url!r} is not a URL of a server; write it as http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), prefix, tls)

    @property
    def url(self) -> str:
        """As a user would write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"


class Pool:
    """Connections to one server; those that are idle are used again. `opened` counts connects."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self.address = address
        self.opened = 0
        self._idle: list[Connection] = []
        self._tls: SSLContext | None = create_default_context() if address.tls else None
        fields = {"Host": f"{address.host}:{address.port}", "Accept": "*/*", **headers}
        for name, value in fields.items():
            if any(character in name + value for character in "\r\n"):
                raise CoterieError(f"header {name!r} holds a line break")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    async def request(self, method: str, path: str, body: bytes, choose: Callable[[Head], Sink]) -> Head:
        """One exchange; an idle connection that the server had closed meanwhile is replaced, once.

        Raises OSError (Cut is one) or BadAnswer.
        """
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        data = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._fields}{length}\r\n".encode() + body
        connection = self._take()
        if connection is not None:
            try:
                return await self._exchange(connection, data, choose)
            except Cut as error:
                if not error.stale:
                    raise
        return await self._exchange(await self._open(), data, choose)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        self.opened += 1
        _, connection = await loop.create_connection(Connection, self.address.host, self.address.port, ssl=self._tls)
        return connection

    async def _exchange(self, connection: Connection, data: bytes, choose: Callable[[Head], Sink]) -> Head:
        head = await connection.exchange(data, choose)
        if connection.reusable:
            self._idle.append(connection)
        return head
