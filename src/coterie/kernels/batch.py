"""ForwardBatch: one step's work as plain integers. Rows of a sequence are contiguous and in position order.

Not a schedule (the engine makes this from one) and not backend arrays (`Kernels.prepare` makes those from this).
Without a cache (`block_tables is None`) each sequence attends within its own rows only: training uses that form.
Letters: T rows (tokens) of the step, S sequences, M rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Inputs of one forward. Zero rows is legal: every rank enters every collective.

    token_ids [T], positions [T] (absolute), query_start [S+1] (row offsets), context_lens [S] (cached + new tokens),
    block_tables [S, max blocks] block ids padded with -1, slot_mapping [T] (block * page_size + offset),
    logit_rows [M]. `most_tokens`: the most rows that any rank has in this step, where the ranks have agreed on it.
    """

    token_ids: Int32
    positions: Int32
    query_start: Int32
    context_lens: Int32
    logit_rows: Int32
    block_tables: Int32 | None = None
    slot_mapping: Int64 | None = None
    page_size: int = 0
    most_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @classmethod
    def packed(cls, token_ids: NDArray[np.integer], lengths: NDArray[np.integer]) -> ForwardBatch:
        """Whole sequences laid end to end, no cache, logits wanted for every row."""
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths] or [np.zeros(0, np.int32)])
        rows = np.arange(starts[-1], dtype=np.int32)
        return cls(np.asarray(token_ids, np.int32), positions, starts, np.asarray(lengths, np.int32), rows)

    def split(self, row: int) -> tuple[ForwardBatch, ForwardBatch]:
        """The rows before `row` and those from it on. A sequence may be cut, which needs a cache: its second part reads
        what its first part has written. Either half may be empty."""
        assert 0 <= row <= self.num_tokens, f"row {row} of {self.num_tokens}"
        first = int(np.searchsorted(self.query_start[1:], row, side="right"))
        inside = first < self.num_sequences and self.query_start[first] < row
        assert not inside or self.block_tables is not None, "a sequence without a cache cannot be cut"
        return self._part(0, row, slice(0, first + inside)), self._part(row, self.num_tokens, slice(first, None))

    def _part(self, begin: int, end: int, sequences: slice) -> ForwardBatch:
        """Rows [begin, end), which belong to `sequences`."""
        starts = self.query_start[:-1][sequences]
        ends = self.query_start[1:][sequences]
        cut_off = np.maximum(ends - end, 0).astype(np.int32)
        offsets = np.concatenate([np.clip(starts, begin, end), [end]]).astype(np.int32) - begin
        rows = (self.logit_rows >= begin) & (self.logit_rows < end)
        return ForwardBatch(
            token_ids=self.token_ids[begin:end],
            positions=self.positions[begin:end],
            query_start=offsets.astype(np.int32),
            context_lens=(self.context_lens[sequences] - cut_off).astype(np.int32),
            logit_rows=(self.logit_rows[rows] - begin).astype(np.int32),
            block_tables=None if self.block_tables is None else self.block_tables[sequences],
            slot_mapping=None if self.slot_mapping is None else self.slot_mapping[begin:end],
            page_size=self.page_size,
            most_tokens=self.most_tokens,
        )
