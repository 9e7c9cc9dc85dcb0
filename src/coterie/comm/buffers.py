"""BufferPool: byte buffers of exchanges, lent and given back, so that a step allocates nothing after the first.

A buffer belongs to one exchange until it is released: two micro-batches, or two exchanges in flight, never share one,
and no parity has to be counted. A buffer that is dropped (an exception closed its generator) is garbage, not reused:
a transport may still write to it. One engine thread per pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
UNIT = 1 << 16
"""Sizes are rounded up to this, so that steps of slightly different length share buffers."""


class Lease:
    """A lent buffer."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, pool: BufferPool, buffer: Bytes) -> None:
        self._pool, self._buffer = pool, buffer

    def rows(self, count: int, width: int) -> Bytes:
        """The first `count` rows of `width` bytes."""
        return self._buffer[: count * width].reshape(count, width)

    @property
    def whole(self) -> Bytes:
        """All of it, at least what was asked for."""
        return self._buffer

    def release(self) -> None:
        """Give it back; nobody may look at it after this."""
        self._pool._take_back(self._buffer)
        self._buffer = self._buffer[:0]


class BufferPool:
    """Free buffers by size. `allocated_bytes` is what it holds and has lent; the memory plan counts it."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self.allocated_bytes = 0
        self.lent = 0

    def lease(self, nbytes: int) -> Lease:
        """A buffer of at least `nbytes`, the smallest free one that fits."""
        self.lent += 1
        best, room = -1, 0
        for index, buffer in enumerate(self._free):
            if nbytes <= buffer.nbytes and (best < 0 or buffer.nbytes < room):
                best, room = index, buffer.nbytes
        if best >= 0:
            return Lease(self, self._free.pop(best))
        size = max(-(-nbytes // UNIT), 1) * UNIT
        if self._free:  # grow one instead of keeping both
            self.allocated_bytes -= len(self._free.pop())
        self.allocated_bytes += size
        return Lease(self, np.empty(size, np.uint8))

    def _take_back(self, buffer: Bytes) -> None:
        if len(buffer):
            self.lent -= 1
            self._free.append(buffer)


def take_rows(source: NDArray[Any], index: NDArray[np.integer[Any]], out: NDArray[Any]) -> NDArray[Any]:
    """source[index] into `out`; indices are known to be in range."""
    if len(index):
        np.take(source, index, axis=0, out=out, mode="clip")
    return out
