"""Turns of the event loop: how much JSON may be made before others get theirs.

All streams share one loop, so whoever has much to encode does it in pieces: `EncodedList` keeps what is encoded, so
that an answer's end has little left to do, and `Turn` gives the loop away once enough was made. Counted in bytes of
JSON, which is what the work is proportional to; not in time, so that tests can count too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

TURN_BYTES = 128 * 1024
"""JSON made in one turn, about 10 ms of work."""

PIECE_POSITIONS = 64
"""Tokens whose log-probabilities are encoded as one piece: 20 alternatives each are about 70 kB."""

PIECE_BYTES = 64 * 1024
"""What such a piece counts."""

EVENT_BYTES = 128
"""What an event counts that makes less JSON: it is work too."""

_ENCODER = msgspec.json.Encoder()


class Turn:
    """Counts what is made in a turn."""

    def __init__(self) -> None:
        self._made = 0

    def spend(self, num_bytes: int) -> bool:
        """Account for work that was done; whether it is time to `give` the loop away."""
        self._made += max(num_bytes, EVENT_BYTES)
        return self._made >= TURN_BYTES

    async def give(self) -> None:
        """Let others have their turns."""
        self._made = 0
        await asyncio.sleep(0)


class EncodedList:
    """A JSON list that is encoded as it grows."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def extend(self, values: Sequence[Any]) -> int:
        """Add values; returns the bytes that they take."""
        if not values:
            return 0
        piece = _ENCODER.encode(values)[1:-1]
        self._pieces.append(piece)
        return len(piece)

    def add(self, other: EncodedList) -> None:
        """Add another list's values."""
        self._pieces += other._pieces

    def copy(self) -> EncodedList:
        """A list that begins with the same values."""
        found = EncodedList()
        found._pieces = self._pieces[:]
        return found

    @property
    def json(self) -> Any:
        """The list, for a Struct that is encoded: it stands there as it is."""
        return msgspec.Raw(b"[%b]" % b",".join(self._pieces))


def pieces(values: Sequence[T], size: int = PIECE_POSITIONS) -> Iterator[Sequence[T]]:
    """A sequence in pieces."""
    return (values[start : start + size] for start in range(0, len(values), size))
