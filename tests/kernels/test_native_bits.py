"""The promise of the native backend: a row's bits depend on the row alone. Compared byte for byte, never by tolerance.

Each op runs on a whole batch with one thread; then on the row alone, in other batch sizes, and with 2 and 3 threads.
Attention also in chunks, at other page sizes, on other pages and beside other sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import KINDS, LEVELS, PagedSequences, fill_caches, gqa_spec, make_bank, mla_spec, normal, plain_stream

from coterie.kernels.api import LatentMaps
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.spec.cache import CacheKind as WeightKind
from coterie.spec.model import AttentionSpec, MoESpec

TOTAL = 300
BATCHES = (1, 2, 7, 64, TOTAL)
MLA, GQA = mla_spec(5, 40, 24, 70, 10), gqa_spec(6, 2, 50, 37, 34)


def same_bits(got: Any, expected: Any) -> bool:
    return bool(got.shape == expected.shape and got.tobytes() == expected.tobytes())


def row_ops(kernels: NativeKernels, kind: WeightKind) -> dict[str, Callable[[np.ndarray], tuple[np.ndarray, ...]]]:
    """Every op that maps rows to rows, as functions of row numbers into fixed inputs."""
    x, y, z = normal(1, TOTAL, 131), normal(2, TOTAL, 131), normal(3, TOTAL, 1, scale=4.0)
    weight, bias, scale = normal(4, 1, 77, 131), normal(5, 77), normal(6, 131)
    bank = make_bank(kernels, weight, kind)
    heads, per_head = normal(7, TOTAL, 5, 131), make_bank(kernels, normal(8, 5, 33, 131), kind)
    w_uk = make_bank(kernels, normal(9, MLA.num_heads, MLA.kv_lora_rank, MLA.qk_nope_head_dim), kind)
    mla_q, kv = normal(10, TOTAL, MLA.num_heads * MLA.qk_head_dim), normal(11, TOTAL, MLA.latent_width)
    gqa_q, gqa_k = normal(12, TOTAL, 6 * GQA.qk_head_dim), normal(13, TOTAL, 2 * GQA.qk_head_dim)
    norms, latent_norm = (normal(14, GQA.qk_head_dim), normal(15, GQA.qk_head_dim)), normal(16, MLA.kv_lora_rank)
    tables = [kernels.rope_table(spec.rope, 4096) for spec in (MLA, GQA)]
    positions = np.random.default_rng(0).integers(0, 4096, TOTAL).astype(np.int32)
    moe = MoESpec(40, 6, 8, "sigmoid", True, 8, 4, "top2_sum", True, 1e-20, True, 2.5)
    maps = LatentMaps(w_uk, latent_norm, tables[0])
    gate, correction = make_bank(kernels, normal(17, 1, 40, 131), "f32"), normal(18, 40)
    chosen, expert_rows = normal(19, TOTAL, 6), normal(20, TOTAL * 6, 131)
    places = np.random.default_rng(1).permutation(TOTAL * 6).reshape(TOTAL, 6)
    return {
        "linear": lambda r: (kernels.linear(x[r], bank, bias),),
        "head_linear": lambda r: (kernels.head_linear(heads[r], per_head),),
        "norm": lambda r: (kernels.norm(x[r], scale, 1e-6),),
        "add_norm": lambda r: kernels.add_norm(x[r], y[r], scale, 1e-6),
        "sigmoid_scale": lambda r: (kernels.sigmoid_scale(x[r], z[r]),),
        "mla_inputs": lambda r: kernels.mla_inputs(mla_q[r], kv[r], maps, positions[r], MLA),
        "gqa_inputs": lambda r: kernels.gqa_inputs(gqa_q[r], gqa_k[r], norms, tables[1], positions[r], GQA),
        "route": lambda r: tuple(kernels.route(x[r], gate, correction, moe)),
        "combine": lambda r: (kernels.combine(expert_rows, places[r], chosen[r], y[r]),),
    }


OPS = ("linear", "head_linear", "norm", "add_norm", "sigmoid_scale", "mla_inputs", "gqa_inputs", "route", "combine")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", OPS)
def test_rows_do_not_depend_on_batch_or_threads(name: str, isa: str, kind: WeightKind) -> None:
    expected = row_ops(NativeKernels(1, isa), kind)[name](np.arange(TOTAL))
    for threads in (1, 2, 3):
        op = row_ops(NativeKernels(threads, isa), kind)[name]
        for size in BATCHES:
            for start in (0, 3, 117, TOTAL - size):
                rows = np.arange(start, min(start + size, TOTAL))
                got = op(rows)
                for mine, whole in zip(got, expected, strict=True):
                    assert same_bits(mine, whole[rows]), f"{name}: rows {start}+{size}, {threads} threads"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", LEVELS)
def test_expert_rows_do_not_depend_on_who_shares_the_expert(isa: str, kind: WeightKind) -> None:
    inner, hidden, count = 45, 131, 4
    x = normal(21, TOTAL, hidden)
    expert = np.random.default_rng(2).integers(0, count, TOTAL)
    expected: np.ndarray | None = None
    for threads in (1, 2, 3):
        kernels = NativeKernels(threads, isa)
        gate_up = make_bank(kernels, normal(22, count, 2 * inner, hidden, scale=0.3), kind, 2)
        down = make_bank(kernels, normal(23, count, hidden, inner, scale=0.3), kind)
        for size in BATCHES[::-1]:
            rows = np.arange(TOTAL)[-size:]
            order = rows[np.argsort(expert[rows], kind="stable")]
            counts = np.bincount(expert[rows], minlength=count)
            got = np.empty((TOTAL, hidden), np.float32)
            got[order] = kernels.experts(x[order], counts, gate_up, down)
            expected = got if expected is None else expected
            assert same_bits(got[rows], expected[rows]), f"{size} rows, {threads} threads"


def attention_inputs(spec: AttentionSpec, total: int) -> tuple[np.ndarray, list[np.ndarray]]:
    latent = spec.kind == "mla"
    width = spec.latent_width if latent else spec.qk_head_dim
    key_width = width if latent else spec.num_kv_heads * width
    rows = [normal(24, total, key_width)] + ([] if latent else [normal(25, total, spec.num_kv_heads * spec.v_head_dim)])
    return normal(26, total, spec.num_heads, width, scale=1.5), rows


@pytest.mark.parametrize("spec", [MLA, GQA, mla_spec(16, 8, 8, 64, 8)], ids=["mla5", "gqa", "mla16"])
@pytest.mark.parametrize("isa", LEVELS)
def test_attention_without_cache_equals_paged_f32(isa: str, spec: AttentionSpec) -> None:
    """Packed rows, one page after another, any page size, chunked or whole: one answer."""
    lengths = (1, 64, 130, 105)
    query, rows = attention_inputs(spec, TOTAL)
    one = NativeKernels(1, isa)
    packed = one.prepare(ForwardBatch.packed(np.zeros(TOTAL, np.int32), np.array(lengths)))
    expected = one.attend(query, rows[0], rows[1] if rows[1:] else None, packed, spec)
    starts = np.cumsum((0, *lengths))
    for threads, page_size in [(1, 64), (2, 16), (3, 1), (2, 130)]:
        kernels = NativeKernels(threads, isa)
        layout = PagedSequences(lengths, page_size, seed=threads)
        caches, whole = fill_caches(kernels, layout, rows, "f32")
        values = caches[1] if caches[1:] else None
        assert same_bits(kernels.attend(query, caches[0], values, whole, spec), expected)
        for s, begin, end in [(2, 0, 1), (2, 63, 65), (2, 129, 130), (3, 17, 80), (1, 57, 64), (0, 0, 1)]:
            part = kernels.prepare(layout.batch([(3, 4, 5), (s, begin, end)]))
            at = slice(starts[s] + begin, starts[s] + end)
            mixed = np.concatenate([query[starts[3] + 4][None], query[at]])
            got = kernels.attend(mixed, caches[0], values, part, spec)
            assert same_bits(got[1:], expected[at]), f"sequence {s} rows {begin}-{end}, pages of {page_size}"
            assert same_bits(got[0], expected[starts[3] + 4])


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("isa", LEVELS)
def test_bf16_cache_chunked_equals_whole(isa: str, spec: AttentionSpec, chunk: int) -> None:
    """Chunks write their rows as they go, so later slots still hold what another sequence left there."""
    total = 150
    query, rows = attention_inputs(spec, total)
    kernels, layout = NativeKernels(2, isa), PagedSequences((total,), 64)
    caches, whole = fill_caches(kernels, layout, rows, "bf16")
    expected = kernels.attend(query, caches[0], caches[1] if caches[1:] else None, whole, spec)
    stale = [np.full_like(cache, 0x7FC0) for cache in caches]
    for begin in range(0, total, chunk):
        part = kernels.prepare(layout.batch([(0, begin, min(begin + chunk, total))]))
        at = slice(begin, begin + part.num_tokens)
        for cache, values in zip(stale, rows, strict=True):
            kernels.cache_write(cache, values[at], part, plain_stream(values))
        got = kernels.attend(query[at], stale[0], stale[1] if stale[1:] else None, part, spec)
        assert same_bits(got, expected[at])


@pytest.mark.parametrize("isa", LEVELS)
def test_denormals_are_flushed_the_same_in_every_thread(isa: str) -> None:
    x, weight = normal(27, TOTAL, 131, scale=1e-20), normal(28, 1, 2000, 131, scale=1e-20)
    alone = NativeKernels(1, isa)
    expected = alone.linear(x, make_bank(alone, weight, "f32"))
    assert not expected.any()
    many = NativeKernels(3, isa)
    assert same_bits(many.linear(x, make_bank(many, weight, "f32")), expected)
    assert np.float32(1e-30) * np.float32(1e-10) != 0, "the caller's own rounding mode must be left as it was"
