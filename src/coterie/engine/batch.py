"""make_batch: a Schedule as the plain integers that one forward takes. Decides nothing, allocates no blocks.

Also those integers as one vector, for ranks that compute a batch which another has scheduled.

Rows follow the schedule's entries; within an entry they are in position order. `logit_rows` are the rows of each
entry's `logit_positions`, so the runner's logits line up with `logit_owners`.
"""

from __future__ import annotations

import numpy as np

from coterie.engine.request import Schedule, ScheduledRequest
from coterie.kernels.batch import ForwardBatch, Int64

_HEADER = 5
"""Words that say how many there are of what."""


def make_batch(schedule: Schedule, page_size: int) -> ForwardBatch:
    """Lay the schedule's rows end to end. An empty schedule gives a batch of zero rows."""
    entries = schedule.entries
    lengths = np.fromiter((entry.num_tokens for entry in entries), np.int32, len(entries))
    starts = np.fromiter((entry.start for entry in entries), np.int32, len(entries))
    query_start = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    num_rows = int(query_start[-1])
    sequence = np.repeat(np.arange(len(entries)), lengths)
    positions = np.arange(num_rows, dtype=np.int32) - query_start[sequence] + starts[sequence]
    tokens = [token for entry in entries for token in entry.request.token_ids[entry.start : entry.end]]
    block_tables = np.full((len(entries), max((len(e.request.block_ids) for e in entries), default=0)), -1, np.int32)
    for row, entry in enumerate(entries):
        block_tables[row, : len(entry.request.block_ids)] = entry.request.block_ids
    pages = block_tables[sequence, positions // page_size] if num_rows else np.zeros(0, np.int32)
    if num_rows and int(pages.min()) < 0:
        raise AssertionError("a scheduled position has no block")
    return ForwardBatch(
        token_ids=np.asarray(tokens, np.int32).reshape(num_rows),
        positions=positions.astype(np.int32),
        query_start=query_start,
        context_lens=starts + lengths,
        logit_rows=_logit_rows(entries, query_start),
        block_tables=block_tables,
        slot_mapping=pages.astype(np.int64) * page_size + positions % page_size,
        page_size=page_size,
    )


def logit_owners(schedule: Schedule) -> list[tuple[ScheduledRequest, slice]]:
    """Which rows of the step's logits belong to which entry; entries without logits are left out."""
    owners, start = [], 0
    for entry in schedule.entries:
        count = len(entry.logit_positions)
        if count:
            owners.append((entry, slice(start, start + count)))
            start += count
    return owners


def num_words(batch: ForwardBatch) -> int:
    """Length of `to_words`."""
    assert batch.block_tables is not None and batch.slot_mapping is not None
    arrays = (batch.token_ids, batch.positions, batch.query_start, batch.context_lens, batch.logit_rows)
    return _HEADER + sum(array.size for array in (*arrays, batch.block_tables, batch.slot_mapping))


def to_words(batch: ForwardBatch) -> Int64:
    """A batch over a cache as one vector; `most_tokens` is left out."""
    assert batch.block_tables is not None and batch.slot_mapping is not None
    tables = batch.block_tables
    header = [batch.num_tokens, batch.num_sequences, len(batch.logit_rows), tables.shape[1], batch.page_size]
    arrays = (batch.token_ids, batch.positions, batch.query_start, batch.context_lens, batch.logit_rows)
    return np.concatenate([header, *arrays, tables.reshape(-1), batch.slot_mapping]).astype(np.int64)


def from_words(words: Int64) -> ForwardBatch:
    """The batch of `to_words`."""
    tokens, sequences, logits, width, page_size = (int(word) for word in words[:_HEADER])
    sizes = [tokens, tokens, sequences + 1, sequences, logits, sequences * width, tokens]
    parts = np.split(words[_HEADER:], np.cumsum(sizes)[:-1])
    token_ids, positions, query_start, context_lens, logit_rows, tables = (part.astype(np.int32) for part in parts[:6])
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_lens=context_lens,
        logit_rows=logit_rows,
        block_tables=tables.reshape(sequences, width),
        slot_mapping=parts[6],
        page_size=page_size,
    )


def _logit_rows(entries: tuple[ScheduledRequest, ...], query_start: np.ndarray) -> np.ndarray:
    rows = [
        np.arange(wanted.start - entry.start, wanted.stop - entry.start, dtype=np.int32) + first
        for entry, first in zip(entries, query_start[:-1], strict=True)
        if len(wanted := entry.logit_positions)
    ]
    return np.concatenate(rows) if rows else np.zeros(0, np.int32)
