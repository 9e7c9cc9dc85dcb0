"""Connection: uvicorn's HTTP/1.1 connection with bounds on time and size, and a strict reading of a request's head.

States: *resting* (no request is being answered: its head has not arrived, or the connection is kept alive), *working*,
*doomed* (the last answer is out; what still comes is thrown away until the client has read it). A head has so many
seconds from its first byte, or from the connection's beginning. Not here: bodies (`server.limits`), how many
connections there may be (`server.acceptor`).
"""

from __future__ import annotations

import asyncio
import re
import sys
from http import HTTPStatus
from typing import Any, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from coterie.server.config import ConnectionLimits
from coterie.server.errors import Fault

LINGER_SECONDS = 2.0
"""How long a client has to read our last words; a connection that is closed while it still sends would lose them."""
LINGER_BYTES = 16 * 1024 * 1024
"""How much of what it still sends is thrown away meanwhile."""

_BLANK_LINE = re.compile(rb"\n\r?\n")  # as h11 finds the end of a head
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ONCE = frozenset({b"content-length", b"transfer-encoding", b"host"})


class BadHead(h11.RemoteProtocolError):
    """A head that another reader may understand otherwise, or one that is too long."""


def check_head(head: bytes, max_bytes: int) -> None:
    """Raise BadHead for what intermediaries are known to read differently: where a line, a head or a body ends.

    head: the request line, the header lines and the blank line, as they came.
    """
    if len(head) > max_bytes:
        raise BadHead(f"the head is longer than {max_bytes} bytes (--max-header-bytes)", error_status_hint=431)
    if not head.count(b"\r\n") == head.count(b"\n") == head.count(b"\r"):
        raise BadHead("a line of the head does not end with CR LF, or there is a CR within it")
    if control := _CONTROL.search(head):
        raise BadHead(f"the head holds the byte {control[0][0]:#04x}")
    lines = head.split(b"\r\n")
    if not lines[0].endswith((b" HTTP/1.1", b" HTTP/1.0")):
        raise BadHead("HTTP is spoken here in versions 1.0 and 1.1", error_status_hint=505)
    seen: dict[bytes, bytes] = {}
    for line in lines[1:-2]:
        if line[:1] in b" \t":
            raise BadHead("a header is folded over several lines")
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in _ONCE:
            if name in seen or b"," in value:
                raise BadHead(f"there is more than one {name.decode().title()}")
            seen[name] = value
    if b"transfer-encoding" in seen and (b"content-length" in seen or lines[0].endswith(b"HTTP/1.0")):
        other = "a Content-Length" if b"content-length" in seen else "HTTP/1.0"
        raise BadHead(f"Transfer-Encoding does not go with {other}")


class _Strict(h11.Connection):
    """h11's reader that checks each head as it came before it is acted on."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(h11.SERVER, max_bytes)
        self._max_bytes = max_bytes

    def next_event(self) -> Any:
        """The next event, as h11 gives it. Raises h11.RemoteProtocolError."""
        begins = self.their_state is h11.IDLE
        pending = self.trailing_data[0] if begins else b""
        event = super().next_event()
        if begins and isinstance(event, h11.Request):
            end = _BLANK_LINE.search(pending)
            assert end is not None, "a head without an end was read"
            check_head(pending[: end.end()], self._max_bytes)
        return event


class Keeper(Protocol):
    """Who counts the connections."""

    limits: ConnectionLimits

    def rests(self, connection: Connection) -> None:
        """It waits for a request from now on."""

    def works(self, connection: Connection) -> None:
        """It has one."""

    def leaves(self, connection: Connection) -> None:
        """It is closed."""


class Connection(H11Protocol):
    """One connection. `app`: who answers, the configured application unless another is named; then it ends after one
    answer and its head has `head_seconds`."""

    def __init__(
        self, keeper: Keeper, config: uvicorn.Config, state: UvicornState, app: Any = None, head_seconds: float = 0.0
    ) -> None:
        super().__init__(config, state, {})
        self._keeper, self._limits = keeper, keeper.limits
        self.conn = _Strict(self._limits.max_header_bytes)
        self._once = app is not None
        self._head_seconds = head_seconds or self._limits.max_header_seconds
        if app is not None:
            self.app = app
        self._socket: asyncio.Transport
        self.is_doomed = False
        self._thrown_away = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        super().connection_made(_Polite(transport, self))
        self._expect_head()
        self._keeper.rests(self)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer, self._end_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._keeper.leaves(self)
        self.is_doomed = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_doomed:
            self._thrown_away += len(data)
            if self._thrown_away > LINGER_BYTES:
                self._socket.abort()
            return
        if self._is_resting:
            self._expect_head()
        super().data_received(data)
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._limits.max_unread_seconds, self._socket.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    # What uvicorn says

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._once:
            self.end()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """Called while the reader's error is handled."""
        error = sys.exc_info()[1]
        hint = getattr(error, "error_status_hint", 400)
        if isinstance(error, BadHead):
            msg = str(error)
        elif hint == 431:
            msg = f"the head is longer than {self._limits.max_header_bytes} bytes (--max-header-bytes)"
        else:
            msg = f"this is not HTTP/1.1: {error}"
        self._refuse(Fault(hint if hint in (431, 505) else 400, msg, code="bad_http", close=True))

    def shutdown(self) -> None:
        """Close once the answer that is under way is out."""
        if not self.is_doomed:
            super().shutdown()

    # Ends

    def end(self) -> None:
        """Close, once what was sent is out; while the client still sends, only when it has had time to read it."""
        if self.is_doomed:
            return
        self.is_doomed = True
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        seconds = LINGER_SECONDS if not self._socket.get_write_buffer_size() else self._limits.max_unread_seconds
        self._end_timer = self.loop.call_later(seconds, self._socket.abort)
        if self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self.conn.trailing_data[0]:
            self.flow.resume_reading()
            if self._socket.can_write_eof():
                self._socket.write_eof()
        else:
            self._socket.close()
        self._settle()

    def _refuse(self, fault: Fault) -> None:
        """Answer with an error unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._socket.write(raw_answer(fault))
        self.end()

    @property
    def _is_resting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _settle(self) -> None:
        """Tell the keeper whether it waits for a request; if not, no head is awaited either."""
        if self._is_resting and not self.is_doomed:
            self._keeper.rests(self)
            return
        self._keeper.works(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"the head did not arrive within {self._head_seconds:g} s (--max-header-seconds)"
            self._refuse(Fault(408, message, code="request_timeout", retry=False, close=True))
        else:
            self.end()


class _Polite(asyncio.Transport):
    """A connection's transport as uvicorn sees it: `close` is the connection's `end`."""

    def __init__(self, socket: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._socket, self._connection = socket, connection

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.is_doomed or self._socket.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._connection.is_doomed:
            self._socket.write(data)

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._socket.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default)


def raw_answer(fault: Fault) -> bytes:
    """An error as bytes, for clients whose request was not understood."""
    body = fault.body()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **fault.headers()}
    lines = [f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
