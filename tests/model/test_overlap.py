"""Two micro-batches: strict turns, cut batches with the same bits, local ranks that exchange in turn."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cache.streams import PagedCache
from coterie.comm.local import LocalTransport
from coterie.engine.runner import ModelRunner
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.model.loader import load_weights
from coterie.model.overlap import drive, drive_all, interleave
from coterie.model.shipped import shipped_model_path
from coterie.model.transformer import Runtime, Transformer
from coterie.spec.model import ModelSpec

PAGE = 4


def paged(lengths: list[int], cached: list[int], wanted: list[int]) -> ForwardBatch:
    """Sequences of `lengths` new rows after `cached` ones, each in blocks of its own; logits of rows `wanted`."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate(
        [np.arange(c, c + n) for n, c in zip(lengths, cached, strict=True)] or [np.zeros(0)]
    ).astype(np.int32)
    context = np.array([n + c for n, c in zip(lengths, cached, strict=True)], np.int32)
    width = max((-(-int(c) // PAGE) for c in context), default=0)
    tables = np.full((len(lengths), width), -1, np.int32)
    used = 0
    for row, length in enumerate(context):
        blocks = -(-int(length) // PAGE)
        tables[row, :blocks] = np.arange(used, used + blocks)
        used += blocks
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    pages = tables[sequence, positions // PAGE].astype(np.int64) if len(positions) else np.zeros(0, np.int64)
    tokens = (np.arange(starts[-1]) * 37 % 500).astype(np.int32)
    slots = pages * PAGE + positions % PAGE
    return ForwardBatch(tokens, positions, starts, context, np.array(wanted, np.int32), tables, slots, PAGE)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6), st.data())
def test_a_cut_keeps_every_row_and_its_context(sequences: list[tuple[int, int]], data: st.DataObject) -> None:
    lengths, cached = [n for n, _ in sequences], [c for _, c in sequences]
    total = sum(lengths)
    wanted = sorted(data.draw(st.sets(st.integers(0, total - 1)))) if total else []
    whole = paged(lengths, cached, wanted)
    row = data.draw(st.integers(0, total))
    halves = whole.split(row)
    assert [half.num_tokens for half in halves] == [row, total - row]
    np.testing.assert_array_equal(np.concatenate([h.token_ids for h in halves]), whole.token_ids)
    np.testing.assert_array_equal(np.concatenate([h.slot_mapping for h in halves]), whole.slot_mapping)  # type: ignore[misc]
    np.testing.assert_array_equal(np.concatenate([halves[0].logit_rows, halves[1].logit_rows + row]), wanted)
    for half in halves:
        assert half.query_start[0] == 0 and half.query_start[-1] == half.num_tokens
        assert (np.diff(half.query_start) > 0).all()
        assert half.block_tables is not None and len(half.block_tables) == half.num_sequences
        for sequence in range(half.num_sequences):
            last = half.query_start[sequence + 1] - 1
            assert half.context_lens[sequence] == half.positions[last] + 1, "a row sees what lies before it, and itself"
            block = half.block_tables[sequence, half.positions[last] // PAGE]
            assert half.slot_mapping is not None
            assert half.slot_mapping[last] == block * PAGE + half.positions[last] % PAGE


def test_a_sequence_without_a_cache_is_cut_between_sequences_only() -> None:
    packed = ForwardBatch.packed(np.arange(7), np.array([3, 4]))
    first, second = packed.split(3)
    assert (first.num_sequences, second.num_sequences) == (1, 1)
    with pytest.raises(AssertionError, match="cannot be cut"):
        packed.split(4)


@pytest.fixture(scope="module")
def shipped():
    path = Path(shipped_model_path())
    spec, kernels = ModelSpec.from_hf(path), NativeKernels()
    weights = load_weights(path, spec, kernels).weights
    return spec, kernels, weights


@pytest.mark.parametrize("row", [0, 1, 9, 10, 13, 21])
def test_two_halves_give_the_bits_of_the_whole(shipped, row: int) -> None:
    """Prompts cut in two and decode rows: the second half reads what the first has just cached, layer by layer."""
    spec, kernels, weights = shipped
    model = Transformer(spec, weights, Runtime.local(kernels), 64)
    whole = paged([10, 1, 9, 1], [0, 0, 0, 0], list(range(21)))

    def run(parts: list[ForwardBatch]) -> np.ndarray:
        cache = PagedCache(spec, 16, PAGE, "bf16", kernels)
        stages = [model.stages(kernels.prepare(part), cache.layers) for part in parts]
        return np.concatenate([kernels.to_host(x) for x in drive(interleave(stages, lambda index: None))])

    hidden = run([whole])
    assert hidden.shape[0] == 21 and np.abs(hidden).max() > 0.1
    np.testing.assert_array_equal(run(list(whole.split(row))), hidden)


@pytest.mark.parametrize("wanted", [[], [20], [0, 4, 11, 20]])
def test_the_runner_gives_the_same_logits_in_one_and_in_two(shipped, wanted: list[int]) -> None:
    spec, kernels, weights = shipped
    model = Transformer(spec, weights, Runtime.local(kernels), 64)
    whole = paged([10, 1, 9, 1], [0, 0, 0, 0], wanted)
    one, two = (
        ModelRunner(model, PagedCache(spec, 16, PAGE, "bf16", kernels), kernels).run(whole, micro_batches=parts)
        for parts in (1, 2)
    )
    assert one.shape == (len(wanted), spec.vocab_size)
    np.testing.assert_array_equal(one, two)


def exchange_twice(transport: LocalTransport, name: str, log: list[str]) -> Generator:
    """Words, then rows, twice."""
    for step in range(2):
        log.append(f"{name}{step} words")
        handle = transport.all_gather(np.array([step]))
        yield handle
        assert handle.result()[:, 0].tolist() == [step] * transport.size
        log.append(f"{name}{step} rows")
        each = [1] * transport.size
        handle = transport.all_to_all_v(np.full((transport.size, 1), step), each, each)
        yield handle
        assert handle.result()[:, 0].tolist() == [step] * transport.size
    return name


def test_micro_batches_take_strict_turns_on_every_local_rank() -> None:
    logs: list[list[str]] = [[], []]
    entered: list[list[int]] = [[], []]
    ranks = [
        interleave([exchange_twice(transport, name, log) for name in "AB"], turns.append)
        for transport, log, turns in zip(LocalTransport.group(2), logs, entered, strict=True)
    ]
    assert drive_all(ranks) == [["A", "B"], ["A", "B"]]
    turns = [f"{name}{step} {what}" for step in (0, 1) for name in "AB" for what in ("words", "rows")]
    assert logs == [turns] * 2, "a turn ends when rows travel, not for words"
    assert entered == [[0, 1, 0, 1, 0, 1]] * 2


def test_a_failing_half_closes_the_other() -> None:
    closed = []

    def waits() -> Generator:
        try:
            yield LocalTransport().all_gather(np.zeros(1, np.int64))
            yield LocalTransport().all_gather(np.zeros(1, np.int64))
        finally:
            closed.append(True)

    def fails() -> Generator:
        yield LocalTransport().all_gather(np.zeros(1, np.int64))
        raise ValueError("this half")

    with pytest.raises(ValueError, match="this half"):
        drive(interleave([waits(), fails()], lambda index: None))
    assert closed == [True]
    assert drive(interleave([], lambda index: None)) == []
