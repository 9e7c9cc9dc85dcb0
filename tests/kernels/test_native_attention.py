"""Attention across splits: long contexts against the oracle, and the same bits however rows, keys and threads are cut.

A context here is longer than one split (256 positions), so that partial results are merged: within one task for prompt
rows, by a second pass for decode rows. Compared byte for byte with the whole prompt on one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    ISAS,
    KINDS,
    LEVELS,
    PagedSequences,
    attention_tolerance,
    fill_caches,
    gqa_spec,
    mla_spec,
    normal,
)

from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.spec.cache import CacheKind
from coterie.spec.model import AttentionSpec

SPECS = {
    "mla5": mla_spec(5, 12, 6, 28, 10),
    "mla16": mla_spec(16, 16, 16, 48, 16),
    "mla130": mla_spec(130, 4, 2, 6, 4),
    "gqa3": gqa_spec(6, 2),
    "gqa1": gqa_spec(5, 5, 16, 16, 16),
    "gqa12": gqa_spec(12, 1, 34, 21, 34),
}
LENGTHS = (700, 256, 257, 40)


def inputs(spec: AttentionSpec, total: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Queries and the rows of each stream."""
    if spec.kind == "mla":
        return normal(1, total, spec.num_heads, spec.latent_width, scale=1.5), [normal(2, total, spec.latent_width)]
    groups = spec.num_kv_heads
    rows = [normal(2, total, groups * spec.qk_head_dim), normal(3, total, groups * spec.v_head_dim)]
    return normal(1, total, spec.num_heads, spec.qk_head_dim, scale=1.5), rows


def attend(
    kernels: NativeKernels, query: np.ndarray, caches: list[Any], batch: ForwardBatch, spec: AttentionSpec
) -> np.ndarray:
    return kernels.attend(query, caches[0], caches[1] if caches[1:] else None, kernels.prepare(batch), spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", ISAS)
def test_long_contexts_against_the_oracle(isa: str, name: str, kind: CacheKind) -> None:
    spec, layout = SPECS[name], PagedSequences(LENGTHS, 16)
    query, rows = inputs(spec, sum(LENGTHS))
    oracle = ReferenceKernels("float64")
    caches, whole = fill_caches(NativeKernels(2, isa), layout, rows, kind)
    wide = [torch.from_numpy(values.astype(np.float64)) for values in rows]
    theirs, prepared = fill_caches(oracle, layout, wide, kind)
    expected = oracle.attend(
        torch.from_numpy(query.astype(np.float64)), theirs[0], theirs[1] if rows[1:] else None, prepared, spec
    )
    got = attend(NativeKernels(2, isa), query, caches, whole.host, spec)
    tolerance = attention_tolerance(isa, kind)
    np.testing.assert_allclose(got, expected.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", LEVELS)
def test_splits_do_not_show(isa: str, name: str, threads: int) -> None:
    """Decode rows alone and together, chunks that start and end inside splits and tiles, the whole at once."""
    spec, layout = SPECS[name], PagedSequences(LENGTHS, 64)
    query, rows = inputs(spec, sum(LENGTHS))
    one = NativeKernels(1, isa)
    caches, whole = fill_caches(one, layout, rows, "bf16")
    expected = attend(one, query, caches, whole.host, spec)
    starts = np.cumsum((0, *LENGTHS))
    kernels = NativeKernels(threads, isa)
    batches = [
        [(0, 699, 700)],
        [(0, 255, 257), (2, 256, 257), (1, 255, 256)],
        [(s, length - 1, length) for s, length in enumerate(LENGTHS)],
        [(0, 511, 513), (3, 0, 40), (2, 250, 257)],
        [(0, 0, 300)],
        [(0, 320, 700)],
        [(s, 0, length) for s, length in enumerate(LENGTHS)],
    ]
    for parts in batches:
        at = np.concatenate([np.arange(starts[s] + begin, starts[s] + end) for s, begin, end in parts])
        got = attend(kernels, query[at], caches, layout.batch(parts), spec)
        assert got.tobytes() == expected[at].tobytes(), f"rows {parts}, {threads} threads"


@pytest.mark.parametrize("name", ["mla16", "gqa3", "gqa1"])
@pytest.mark.parametrize("isa", ISAS)
def test_later_rows_never_reach_earlier_ones(isa: str, name: str) -> None:
    """A NaN or infinity at position p leaves every row before p as it was, and is seen by every row from p on."""
    spec, total = SPECS[name], 600
    query, rows = inputs(spec, total)
    batch = ForwardBatch.packed(np.zeros(total, np.int32), np.array([total]))
    kernels = NativeKernels(2, isa)
    clean = attend(kernels, query, rows, batch, spec)
    for position in (0, 1, 63, 64, 255, 256, 257, 599):
        for bad in (np.nan, np.inf):
            spoilt = [values.copy() for values in rows]
            spoilt[-1][position] = bad
            got = attend(kernels, query, spoilt, batch, spec)
            assert got[:position].tobytes() == clean[:position].tobytes(), f"{bad} at {position}"
            assert not np.isfinite(got[position:]).all(axis=(1, 2)).any(), f"{bad} at {position} is not seen"


@pytest.mark.parametrize("isa", ISAS)
def test_one_key_far_above_the_others_wins(isa: str) -> None:
    """Scores beyond the range of exp: the weight of all other keys is nothing, in the same split or another."""
    spec, total = gqa_spec(2, 1, 16, 16, 16), 600
    keys, values = np.zeros((total, 16), np.float32), normal(4, total, 16)
    keys[[30, 290]] = 1e4
    query = np.ones((total, 2, 16), np.float32)
    got = attend(NativeKernels(2, isa), query, [keys, values], ForwardBatch.packed(np.zeros(total), [total]), spec)
    np.testing.assert_allclose(got[100], np.broadcast_to(values[30], (2, 16)), rtol=1e-6)
    np.testing.assert_allclose(got[599], np.broadcast_to((values[30] + values[290]) / 2, (2, 16)), rtol=1e-5, atol=1e-6)
