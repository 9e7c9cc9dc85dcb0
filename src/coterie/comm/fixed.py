"""FixedMessages: the messages of the form of fixed capacity: header rows, then up to `capacity` packed rows.

Every rank sends one to every rank, all of one size, so nothing has to be known beforehand. The header carries the
number of rows and of (token, expert) pairs, whether the sender had more rows than fit (to any rank: all learn it), and
the counts of experts if some have copies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.comm.buffers import Bytes
from coterie.comm.exchange import FIXED, HEAD, Exchange
from coterie.comm.rows import FanOut
from coterie.comm.transport import Int64

OWN_WORDS = 3
"""After an exchange's header: rows, pairs, whether the sender overflowed."""


class Messages(NamedTuple):
    """What all ranks sent: packed rows [N, width] by source, their sources, rows and pairs from each rank."""

    overflow: bool
    rows: Bytes
    sources: Int64
    counts: Int64
    pairs: Int64
    experts: Int64


class FixedMessages:
    """The layout for rows of `width` bytes of one layer, whose outputs come back in rows of `back` bytes."""

    def __init__(self, width: int, back: int, exchange: Exchange, layer: int) -> None:
        self.width, self.capacity, self.exchange = width, exchange.policy.capacity, exchange
        self.header = exchange.header(FIXED, layer, width, back)

    def _head(self, experts: int) -> int:
        """Header words and the rows that they take."""
        return -(-(HEAD + OWN_WORDS + experts) * 8 // self.width)

    def nbytes(self, experts: int) -> int:
        """Of a message to one rank; a multiple of eight."""
        return -(-(self._head(experts) + self.capacity) * self.width // 8) * 8

    def write(self, out: Bytes, packed: Bytes, plan: FanOut, pairs: Int64, experts: Int64) -> Bytes:
        """Messages to all ranks [R, nbytes]."""
        overflow = int(plan.counts.max(initial=0)) > self.capacity
        words = HEAD + OWN_WORDS + len(experts)
        head = out[:, : words * 8].view(np.int64)
        head[:, :HEAD] = self.exchange.message(self.header)
        head[:, HEAD] = plan.counts
        head[:, HEAD + 1] = pairs
        head[:, HEAD + 2] = overflow
        head[:, HEAD + OWN_WORDS :] = experts
        if overflow:
            return out
        start = 0
        for destination, count in enumerate(plan.counts.tolist()):
            body = self._body(out[destination], len(experts))
            body[:count] = packed[plan.row[start : start + count]]
            start += count
        return out

    def _body(self, message: Bytes, experts: int) -> Bytes:
        start = self._head(experts) * self.width
        return message[start : start + self.capacity * self.width].reshape(self.capacity, self.width)

    def read(self, received: Bytes, experts: int) -> Messages:
        """Messages of all ranks [R, nbytes], checked; the rows are copied together."""
        words = HEAD + OWN_WORDS + experts
        head = received[:, : words * 8].view(np.int64).copy()
        own = self.exchange.hear(head, self.header)
        counts, pairs, overflow = own[:, 0], own[:, 1], bool(own[:, 2].any())
        kept = np.zeros_like(counts) if overflow else counts
        bodies = [self._body(message, experts)[:count] for message, count in zip(received, kept.tolist(), strict=True)]
        sources = np.repeat(np.arange(len(received)), kept)
        return Messages(overflow, np.concatenate(bodies), sources, counts, pairs, own[:, OWN_WORDS:])


def every_one(size: int) -> Int64:
    """One message to each rank."""
    return np.ones(size, np.int64)
