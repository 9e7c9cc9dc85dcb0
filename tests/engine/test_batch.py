"""make_batch: rows, tables, slots and wanted logits of a schedule, and that the logits find their owners again."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.engine.batch import from_words, logit_owners, make_batch, num_words, to_words
from coterie.engine.messages import SamplingParams
from coterie.engine.request import Request, Schedule, ScheduledRequest
from coterie.kernels.batch import ForwardBatch


def request(name: str, tokens: range, blocks: list[int], *, prompt: int | None = None, scored: bool = False) -> Request:
    params = SamplingParams(prompt_logprobs=0 if scored else None)
    made = Request(name, tuple(tokens[:prompt]), params, 100)
    made.token_ids, made.block_ids = list(tokens), blocks
    return made


def test_decode_row_chunk_and_scored_chunk_in_one_batch() -> None:
    decode = request("decode", range(100, 106), [7, 2], prompt=3)
    chunk = request("chunk", range(200, 220), [1, 9, 4])
    scored = request("scored", range(300, 303), [5], scored=True)
    schedule = Schedule(
        (
            ScheduledRequest(decode, 5, 1, samples=True),
            ScheduledRequest(chunk, 3, 6, samples=False),
            ScheduledRequest(scored, 0, 3, samples=True),
        )
    )
    batch = make_batch(schedule, page_size=4)
    assert batch.token_ids.tolist() == [105, *range(203, 209), 300, 301, 302]
    assert batch.positions.tolist() == [5, *range(3, 9), 0, 1, 2]
    assert batch.query_start.tolist() == [0, 1, 7, 10]
    assert batch.context_lens.tolist() == [6, 9, 3]
    assert batch.block_tables is not None and batch.slot_mapping is not None
    assert batch.block_tables.tolist() == [[7, 2, -1], [1, 9, 4], [5, -1, -1]]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 1 * 4 + 3, 36, 37, 38, 39, 16, 20, 21, 22]
    assert batch.logit_rows.tolist() == [0, 7, 8, 9]
    assert (batch.page_size, batch.num_tokens, batch.num_sequences) == (4, 10, 3)
    dtypes = [a.dtype for a in (batch.token_ids, batch.positions, batch.query_start, batch.context_lens)]
    assert dtypes == [np.int32] * 4
    assert [a.dtype for a in (batch.logit_rows, batch.block_tables, batch.slot_mapping)] == [
        np.int32,
        np.int32,
        np.int64,
    ]
    owners = [(entry.request.request_id, rows) for entry, rows in logit_owners(schedule)]
    assert owners == [("decode", slice(0, 1)), ("scored", slice(1, 4))]


def test_an_empty_schedule_is_a_batch_of_no_rows() -> None:
    batch = make_batch(Schedule(()), page_size=64)
    assert batch.num_tokens == batch.num_sequences == 0
    assert batch.query_start.tolist() == [0]
    assert batch.block_tables is not None and batch.block_tables.shape == (0, 0)
    assert batch.slot_mapping is not None and len(batch.slot_mapping) == len(batch.logit_rows) == 0
    assert logit_owners(Schedule(())) == []


def test_a_batch_travels_as_one_vector() -> None:
    entries = (
        ScheduledRequest(request("a", range(9), [3, 1, 7]), 5, 4, samples=True),
        ScheduledRequest(request("b", range(6), [4, 5]), 0, 3, samples=False),
        ScheduledRequest(request("c", range(6), [2, 0]), 5, 1, samples=True),
    )
    for schedule in (Schedule(entries), Schedule(entries[1:2]), Schedule(())):
        batch = make_batch(schedule, 4)
        words = to_words(batch)
        assert words.dtype == np.int64 and len(words) == num_words(batch)
        again = from_words(words)
        for name in ForwardBatch.__dataclass_fields__:
            before, after = getattr(batch, name), getattr(again, name)
            assert getattr(before, "dtype", None) == getattr(after, "dtype", None), name
            np.testing.assert_array_equal(after, before)


def test_a_row_without_block_is_our_mistake() -> None:
    entry = ScheduledRequest(request("a", range(9), [3, 1]), 7, 2, samples=True)
    with pytest.raises(AssertionError, match="no block"):
        make_batch(Schedule((entry, ScheduledRequest(request("b", range(9), [4, 5, 6]), 0, 9, samples=True))), 4)


@pytest.mark.parametrize(
    ("start", "count", "delivered", "samples", "wanted"),
    [
        (0, 4, 0, False, range(4)),
        (4, 6, 4, True, range(4, 10)),
        (0, 4, 4, False, range(4, 4)),  # recomputed after preemption: nothing again
        (2, 5, 4, False, range(4, 7)),  # half old, half new
        (0, 10, 10, True, range(9, 10)),
        (9, 1, 10, True, range(9, 10)),
    ],
)
def test_prompt_rows_are_wanted_once(start: int, count: int, delivered: int, samples: bool, wanted: range) -> None:
    scored = request("a", range(10), [0, 1, 2], scored=True)
    scored.num_prompt_rows = delivered
    assert ScheduledRequest(scored, start, count, samples).logit_positions == wanted
    plain = request("b", range(10), [0, 1, 2])
    assert len(ScheduledRequest(plain, start, count, samples).logit_positions) == samples
