"""Attention in bf16 tiles, on emulated tiles wherever avx512 runs and on real ones where the processor has them.

What it computes is spelled out in float64 with the two roundings it makes, of queries and of softmax weights, so the
bound is tight; shapes are those that tiles do not divide, pages those that a tile cannot read in place. That rows do
not depend on their company is in test_native_attention.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import LEVELS, Floats, PagedSequences, fill_caches, gqa_spec, mla_spec, normal, to_bf16

from coterie.kernels.native import NativeKernels
from coterie.spec.model import AttentionSpec

TILED = [level for level in LEVELS if level.startswith("amx")]
SPECS = {
    "v2-lite": mla_spec(16, 16, 64, 512, 16),
    "one head": mla_spec(1, 16, 16, 48, 16),
    "odd": mla_spec(17, 12, 6, 28, 10),
    "wide heads": gqa_spec(8, 1, 128, 64, 128),
    "two groups": gqa_spec(6, 2),
}
SPLIT = 256

pytestmark = pytest.mark.skipif(not TILED, reason="tile kernels build on avx512")


def case(name: str, total: int) -> tuple[AttentionSpec, Floats, list[Floats]]:
    """Queries, and rows of each stream as a bf16 cache holds them."""
    spec = SPECS[name]
    if spec.kind == "mla":
        return spec, normal(1, total, spec.num_heads, spec.latent_width), [to_bf16(normal(2, total, spec.latent_width))]
    groups = spec.num_kv_heads
    keys, values = (normal(seed, total, groups * dim) for seed, dim in ((2, spec.qk_head_dim), (3, spec.v_head_dim)))
    return spec, normal(1, total, spec.num_heads, spec.qk_head_dim), [to_bf16(keys), to_bf16(values)]


def attend(isa: str, spec: AttentionSpec, query: Floats, caches: list[Any], layout: PagedSequences) -> Floats:
    kernels = NativeKernels(2, isa)
    batch = kernels.prepare(layout.whole())
    return kernels.attend(query, caches[0], caches[1] if caches[1:] else None, batch, spec)


def spelled_out(spec: AttentionSpec, query: Floats, rows: list[Floats], row: int) -> np.ndarray:
    """One row in float64: per split, weights relative to its maximum rounded to bf16, then the splits merged."""
    groups = spec.num_kv_heads if spec.kind != "mla" else 1
    outs = []
    for head in range(spec.num_heads):
        at = head // (spec.num_heads // groups)
        keys = rows[0][: row + 1].reshape(row + 1, groups, -1)[:, at].astype(np.float64)
        values = keys[:, : spec.kv_lora_rank]
        if spec.kind != "mla":
            values = rows[1][: row + 1].reshape(row + 1, groups, -1)[:, at].astype(np.float64)
        scores = keys @ to_bf16(query[row, head]).astype(np.float64) * spec.softmax_scale
        top, out, total = scores.max(), 0.0, 0.0
        for begin in range(0, row + 1, SPLIT):
            part = scores[begin : begin + SPLIT]
            weights = to_bf16(np.exp(part - part.max()).astype(np.float32)).astype(np.float64)
            weights *= np.exp(part.max() - top)
            out, total = out + weights @ values[begin : begin + SPLIT], total + weights.sum()
        outs.append(out / total)
    return np.array(outs)


@pytest.mark.parametrize("page", [7, 16, 64])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", TILED)
def test_rows_are_what_the_two_roundings_leave(isa: str, name: str, page: int) -> None:
    total = 530
    spec, query, rows = case(name, total)
    layout = PagedSequences((total,), page)
    caches, _ = fill_caches(NativeKernels(1, isa), layout, rows, "bf16")
    got = attend(isa, spec, query, caches, layout)
    for row in (0, 1, 15, 31, 32, 255, 256, 300, 529):
        expected = spelled_out(spec, query, rows, row)
        # A weight whose exponential lies at a rounding border may fall to the other side.
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=2e-3 if row else 1e-5)
        assert np.linalg.norm(got[row] - expected) < 4e-4 * np.linalg.norm(expected) + 1e-5, row


@pytest.mark.skipif("amx" not in TILED, reason="this processor has no tiles to compare")
@pytest.mark.parametrize("name", SPECS)
def test_emulated_tiles_give_the_bits_of_the_instructions(name: str) -> None:
    spec, query, rows = case(name, 300)
    layout = PagedSequences((300,), 16)
    caches, _ = fill_caches(NativeKernels(1), layout, rows, "bf16")
    real, emulated = (attend(isa, spec, query, caches, layout) for isa in ("amx", "amx-emulated"))
    assert real.tobytes() == emulated.tobytes()


@pytest.mark.parametrize("name", ["one head", "two groups"])
@pytest.mark.parametrize("isa", TILED)
def test_what_is_no_number_never_reaches_earlier_rows(isa: str, name: str) -> None:
    """Weight zero times NaN would: such rows leave the tile, and the rows that see them are NaN."""
    total = 520
    spec, query, rows = case(name, total)
    layout = PagedSequences((total,), 16)
    clean_caches, _ = fill_caches(NativeKernels(1, isa), layout, rows, "bf16")
    clean = attend(isa, spec, query, clean_caches, layout)
    for position in (0, 1, 31, 32, 255, 256, 519):
        for bad in (np.nan, np.inf, -np.inf):
            spoilt = [values.copy() for values in rows]
            spoilt[-1][position, 0] = bad
            caches, _ = fill_caches(NativeKernels(1, isa), layout, spoilt, "bf16")
            got = attend(isa, spec, query, caches, layout)
            assert got[:position].tobytes() == clean[:position].tobytes(), f"{bad} at {position}"
            assert np.isnan(got[position:, 0]).all(), f"{bad} at {position} is not seen"


@pytest.mark.parametrize("isa", TILED)
def test_pages_of_others_may_hold_anything(isa: str) -> None:
    """Slots that no row of the sequence was written to are filled with NaN."""
    spec, query, rows = case("v2-lite", 70)
    layout = PagedSequences((70,), 16)
    caches, batch = fill_caches(NativeKernels(1, isa), layout, rows, "bf16")
    clean = attend(isa, spec, query, caches, layout)
    written = np.asarray(batch.host.slot_mapping)
    for cache in caches:
        others = np.setdiff1d(np.arange(len(cache)), written)
        cache[others] = 0x7FC0
    assert attend(isa, spec, query, caches, layout).tobytes() == clean.tobytes()


@pytest.mark.parametrize("isa", TILED)
def test_heads_too_wide_for_tiles_are_computed_in_vectors(isa: str) -> None:
    spec = mla_spec(2, 16, 64, 2048, 16)
    layout, rows = PagedSequences((40,), 16), [normal(2, 40, spec.latent_width)]
    query = normal(1, 40, spec.num_heads, spec.latent_width)
    caches, _ = fill_caches(NativeKernels(1, isa), layout, rows, "int8", spec)
    assert attend(isa, spec, query, caches, layout).tobytes() == attend("avx512", spec, query, caches, layout).tobytes()
