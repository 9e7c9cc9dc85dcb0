"""The fused attention block: the bits of the single ops, for every form of MLA and GQA, with and without a cache.

Prompt rows, decode rows and mixtures; all cache kinds; what does not fit is refused when it is bound or called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import ISAS, PagedSequences, gqa_spec, make_bank, mla_spec, normal

from coterie.kernels.api import BlockInput, GroupedWeights, LatentWeights, Projection
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.model.attention import GroupedAttention, LatentAttention, bind
from coterie.model.overlap import drive
from coterie.spec.cache import CacheKind
from coterie.spec.model import AttentionSpec

HIDDEN = 70
CASES = ("mla", "mla q_lora", "mla biases", "gqa", "gqa biases", "gqa norms")
LENGTHS = (300, 33, 1)


def spec_of(case: str) -> AttentionSpec:
    if case.startswith("mla"):
        return replace(mla_spec(5, 12, 6, 28, 10), q_lora_rank=24 if case == "mla q_lora" else None)
    return replace(gqa_spec(6, 2, 18, 13, 8), qk_norm=case == "gqa norms")


def attention(kernels: NativeKernels, case: str, kind: CacheKind = "f32", *, fused: bool) -> Any:
    spec, seeds = spec_of(case), iter(range(100, 200))

    def projection(rows: int, cols: int, *, bias: bool = False) -> Projection:
        bank = make_bank(kernels, normal(next(seeds), 1, rows, cols, scale=cols**-0.5), kind)
        return Projection(bank, kernels.vector(normal(next(seeds), rows)) if bias else None)

    with_bias, rope, heads = "biases" in case, kernels.rope_table(spec.rope, 512), spec.num_heads
    if spec.kind == "mla":
        q_rank = spec.q_lora_rank
        weights: Any = LatentWeights(
            q_a=projection(q_rank, HIDDEN, bias=with_bias) if q_rank else None,
            q_norm=kernels.vector(normal(next(seeds), q_rank)) if q_rank else None,
            q_b=projection(heads * spec.qk_head_dim, q_rank or HIDDEN),
            kv_a=projection(spec.latent_width, HIDDEN, bias=with_bias),
            kv_norm=kernels.vector(normal(next(seeds), spec.kv_lora_rank)),
            w_uk=make_bank(kernels, normal(next(seeds), heads, spec.kv_lora_rank, spec.qk_nope_head_dim), kind),
            w_uv=make_bank(kernels, normal(next(seeds), heads, spec.v_head_dim, spec.kv_lora_rank), kind),
            o=projection(HIDDEN, heads * spec.v_head_dim, bias=with_bias),
            rope=rope,
        )
        return LatentAttention(spec, weights, kernels, bind(kernels, weights, spec) if fused else None)
    norms = (kernels.vector(normal(1, spec.qk_head_dim)), kernels.vector(normal(2, spec.qk_head_dim)))
    groups = spec.num_kv_heads
    weights = GroupedWeights(
        q=projection(heads * spec.qk_head_dim, HIDDEN, bias=with_bias),
        k=projection(groups * spec.qk_head_dim, HIDDEN, bias=with_bias),
        v=projection(groups * spec.v_head_dim, HIDDEN, bias=with_bias),
        o=projection(HIDDEN, heads * spec.v_head_dim, bias=with_bias),
        norms=norms if spec.qk_norm else None,
        rope=rope,
    )
    return GroupedAttention(spec, weights, kernels, bind(kernels, weights, spec) if fused else None)


def entry(rows: int, *, bottom: bool = False) -> BlockInput:
    return BlockInput(normal(1, rows, HIDDEN), None if bottom else normal(2, rows, HIDDEN), normal(3, HIDDEN), 1e-5)


@pytest.mark.parametrize("bottom", [False, True], ids=["residual", "bottom"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_without_cache(isa: str, case: str, *, bottom: bool) -> None:
    kernels, total = NativeKernels(2, isa), sum(LENGTHS)
    batch = kernels.prepare(ForwardBatch.packed(np.zeros(total, np.int32), np.array(LENGTHS)))
    single = drive(attention(kernels, case, fused=False).stages(entry(total, bottom=bottom), batch, {}))
    fused = drive(attention(kernels, case, fused=True).stages(entry(total, bottom=bottom), batch, {}))
    assert [array.tobytes() for array in fused] == [array.tobytes() for array in single]
    assert np.isfinite(fused[0]).all() and fused[0].any()


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_with_cache(isa: str, case: str, kind: CacheKind) -> None:
    """A prompt in chunks beside others, then decode rows; both forms write the same cache and return the same rows."""
    kernels, layout, spec = NativeKernels(2, isa), PagedSequences(LENGTHS, 16), spec_of(case)
    weights: CacheKind = "f32" if kind == "f32" else "bf16"
    blocks = [attention(kernels, case, weights, fused=fused) for fused in (False, True)]
    streams = spec.cache_streams
    caches = [{s.name: kernels.allocate_cache(layout.num_slots, s, kind) for s in streams} for _ in blocks]
    for parts in ([(0, 0, 280)], [(1, 0, 32), (0, 280, 298), (2, 0, 1)], [(0, 298, 299), (1, 32, 33)], [(0, 299, 300)]):
        batch = kernels.prepare(layout.batch(parts))
        step = entry(batch.num_tokens)
        results = [drive(block.stages(step, batch, cache)) for block, cache in zip(blocks, caches, strict=True)]
        assert results[0][0].tobytes() == results[1][0].tobytes(), f"rows {parts}"
        assert results[0][1].tobytes() == results[1][1].tobytes()
    for stream in streams:
        assert caches[0][stream.name].any()
        np.testing.assert_array_equal(caches[0][stream.name], caches[1][stream.name])


@pytest.mark.parametrize("cached", [False, True], ids=["packed", "cached"])
@pytest.mark.parametrize("case", ["mla", "gqa"])
@pytest.mark.parametrize("isa", ISAS)
def test_steps_longer_than_a_part(isa: str, case: str, *, cached: bool) -> None:
    """A block takes its rows in parts; sequences that lie across their borders see all the keys they would."""
    kernels, lengths, spec = NativeKernels(2, isa), (500, 33, 511, 1), spec_of(case)
    layout, total = PagedSequences(lengths, 16), sum(lengths)
    packed = ForwardBatch.packed(np.zeros(total, np.int32), np.array(lengths))
    whole = layout.batch([(i, 0, length) for i, length in enumerate(lengths)])
    batch, streams, results = kernels.prepare(whole if cached else packed), spec.cache_streams, []
    for fused in (False, True):
        cache = {s.name: kernels.allocate_cache(layout.num_slots, s, "bf16") for s in streams} if cached else {}
        out, rows = drive(attention(kernels, case, fused=fused).stages(entry(total), batch, cache))
        results.append([array.tobytes() for array in (out, rows, *cache.values())])
    assert results[0] == results[1]


def test_zero_rows() -> None:
    kernels = NativeKernels(2)
    batch = kernels.prepare(ForwardBatch.packed(np.zeros(0, np.int32), np.zeros(0, np.int32)))
    out, total = drive(attention(kernels, "mla", fused=True).stages(entry(0), batch, {}))
    assert out.shape == total.shape == (0, HIDDEN)


def test_what_does_not_fit_is_refused() -> None:
    kernels, layout = NativeKernels(1), PagedSequences((4,), 4)
    latent, grouped = attention(kernels, "mla", fused=True), attention(kernels, "gqa", fused=True)
    with pytest.raises(ValueError, match="latent_block: kv_a: bank holds 1 matrices"):
        bind(kernels, replace(latent.weights, kv_a=latent.weights.q_b), latent.spec)
    with pytest.raises(ValueError, match="grouped_block: o: bank holds"):
        bind(kernels, replace(grouped.weights, o=grouped.weights.k), grouped.spec)
    batch = kernels.prepare(layout.batch([(0, 3, 4)]))
    with pytest.raises(ValueError, match="a cache comes with block tables and slots"):
        drive(latent.stages(entry(1), batch, {}))
    cache = {s.name: kernels.allocate_cache(layout.num_slots, s, "bf16") for s in latent.spec.cache_streams}
    with pytest.raises(ValueError, match=r"query_start does not span the rows"):
        drive(latent.stages(entry(2), batch, cache))
    beyond = layout.batch([(0, 3, 4)])
    assert beyond.slot_mapping is not None
    beyond.slot_mapping[0] = 99
    with pytest.raises(ValueError, match="slot_mapping holds 99"):
        drive(latent.stages(entry(1), kernels.prepare(beyond), cache))
