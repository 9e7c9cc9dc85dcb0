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
    logit_rows [M].
    """

    token_ids: Int32
    positions: Int32
    query_start: Int32
    context_lens: Int32
    logit_rows: Int32
    block_tables: Int32 | None = None
    slot_mapping: Int64 | None = None
    page_size: int = 0

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
