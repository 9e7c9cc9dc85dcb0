"""Messages over a socket: frames of a 4-byte little-endian length and one msgpack value of a fixed schema.

Nothing is ever unpickled. A frame that is not of the schema is counted and dropped; a length over the bound cannot be
skipped in trust, so it ends the connection. A Wire does not reconnect and keeps no messages.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from coterie.spec.errors import CoterieError

MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_log = logging.getLogger(__name__)

T = TypeVar("T")


class Wire(Generic[T]):
    """One end of a stream socket. `incoming` is the type of a received frame. `send` may be called by several threads,
    `receive` by one."""

    def __init__(self, connection: socket.socket, incoming: type[T], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.num_rejected = 0

    def send(self, value: object) -> None:
        """Write one frame. Raises `CoterieError` if it is over the bound, `OSError` if the peer is gone."""
        data = self._encoder.encode(value)
        if len(data) > self._max_bytes:
            raise CoterieError(f"a message of {len(data)} bytes does not fit in a frame of {self._max_bytes}")
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def limit_sending(self, seconds: float) -> None:
        """Let a `send` to a peer that does not read fail with OSError after so long. The wire is of no use then: a part
        of the frame may have gone."""
        whole, part = divmod(seconds, 1.0)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(whole), int(part * 1_000_000))
        )

    def receive(self) -> Iterator[T]:
        """Values until the peer closes, the connection breaks or a frame is over the bound."""
        while (header := self._read(_LENGTH.size)) is not None:
            (size,) = _LENGTH.unpack(header)
            if size > self._max_bytes:
                self.num_rejected += 1
                _log.error("a frame of %d bytes was announced, %d are allowed; closing", size, self._max_bytes)
                return
            data = self._read(size)
            if data is None:
                return
            try:
                value = self._decoder.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                self.num_rejected += 1
                _log.error("a frame of %d bytes was dropped: %s", size, error)
                continue
            yield value

    def close(self) -> None:
        """End the connection; a blocked `receive` returns."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("the peer had closed already")
        self._socket.close()

    def _read(self, size: int) -> bytearray | None:
        """Exactly `size` bytes, None at the end. Memory grows with what arrives, not with what was announced."""
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._socket.recv(min(size - len(data), 1 << 20))
            except OSError:
                return None
            if not piece:
                return None
            data += piece
        return data
