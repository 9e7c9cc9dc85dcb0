"""What the model must beat on the same held-out text: `xz -9` and interpolated modified Kneser-Ney 5-grams.

All figures are bits per byte. The n-gram models are counted on the register's own training text, over bytes and over
the model's tokens (Chen and Goodman 1998: three discounts, continuation counts below the highest order).
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ORDER = 5
Symbols = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class BaselineBits:
    """Bits per byte of one register's held-out text. `xz_primed`: xz given the training text first."""

    xz: float
    xz_primed: float
    bytes_5gram: float
    tokens_5gram: float


def measure_baselines(train: bytes, held: bytes, train_ids: Symbols, held_ids: Symbols, vocab: int) -> BaselineBits:
    """All baselines of one register: its texts, and the same as token ids."""
    alone = xz_bytes(held)
    primed = xz_bytes(train + held) - xz_bytes(train)
    by_byte = KneserNey(np.frombuffer(train, np.uint8), 256).bits(np.frombuffer(held, np.uint8))
    by_token = KneserNey(train_ids, vocab).bits(held_ids)
    size = len(held)
    return BaselineBits(8 * alone / size, 8 * primed / size, by_byte / size, by_token / size)


def xz_bytes(data: bytes) -> int:
    """Size after `xz -9e` (container included), with a dictionary as large as the data needs."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


@dataclass(frozen=True, slots=True)
class _Order:
    """n-grams of one order, keys ascending: discounted counts; and by context: totals and left-over mass."""

    keys: NDArray[np.uint64]
    discounted: NDArray[np.float64]
    contexts: NDArray[np.uint64]
    totals: NDArray[np.float64]
    left_over: NDArray[np.float64]


class KneserNey:
    """Interpolated modified Kneser-Ney over integer symbols below `vocab` (vocab ** order must fit 64 bits)."""

    def __init__(self, symbols: Symbols, vocab: int, order: int = ORDER) -> None:
        assert float(vocab) ** order <= 2.0**64, f"{vocab} symbols at order {order} do not fit a 64-bit key"
        self.vocab = vocab
        self.orders: list[_Order] = []
        keys, counts = np.unique(_grams(symbols, order, vocab), return_counts=True)
        for length in range(order, 0, -1):
            self.orders.insert(0, _smooth(keys, counts, vocab))
            if length > 1:
                keys, counts = np.unique(keys % np.uint64(vocab ** (length - 1)), return_counts=True)

    def probabilities(self, symbols: Symbols) -> NDArray[np.float64]:
        """Probability of each symbol given up to order - 1 before it."""
        result = np.full(len(symbols), 1.0 / self.vocab)
        for index, order in enumerate(self.orders):
            if len(symbols) <= index:
                break
            grams = _grams(symbols, index + 1, self.vocab)
            context, known = _find(order.contexts, grams // np.uint64(self.vocab))
            gram, seen = _find(order.keys, grams)
            lower = result[index:]
            share = np.where(seen, order.discounted[gram], 0.0) + order.left_over[context] * lower
            result[index:] = np.where(known, share / order.totals[context], lower)
        return result

    def bits(self, symbols: Symbols) -> float:
        """Code length of a sequence in bits."""
        return float(-np.log2(self.probabilities(symbols)).sum())


def _grams(symbols: Symbols, length: int, vocab: int) -> NDArray[np.uint64]:
    """Keys of all n-grams, oldest symbol most significant."""
    wide = symbols.astype(np.uint64)
    count = len(wide) - length + 1
    keys = np.zeros(max(count, 0), np.uint64)
    for offset in range(length):
        keys = keys * np.uint64(vocab) + wide[offset : offset + max(count, 0)]
    return keys


def _smooth(keys: NDArray[np.uint64], counts: NDArray[np.integer], vocab: int) -> _Order:
    frequency = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    n1, n2, n3, n4 = np.maximum(frequency, 1.0)
    y = n1 / (n1 + 2 * n2)
    discounts = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    discount = np.clip(discounts, [0, 0.05, 0.05, 0.05], [0, 0.95, 1.9, 2.9])[np.minimum(counts, 3)]
    contexts, starts = np.unique(keys // np.uint64(vocab), return_index=True)
    totals = np.add.reduceat(counts.astype(np.float64), starts)
    return _Order(keys, counts - discount, contexts, totals, np.add.reduceat(discount, starts))


def _find(table: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    index = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return index, table[index] == wanted
