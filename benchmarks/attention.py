"""Attention of one layer by context: absorbed MLA, expanded MLA and GQA, beside the machine's multiply-add rate.

    python benchmarks/attention.py [--threads 2] [--kind bf16] [--heads 16] [--contexts 128 512 2048] [--isa avx512]

DeepSeek-V2-Lite's shapes (512 + 64 latent, heads of 128 + 64 and 128). Per context: one decode row and the whole
prompt, the operations (causal), the fastest time of several, and the share of the best f32 multiply-add rate that the
native probe reached between the cases. Expanded: keys and values of every head made from the latent (their product is
counted and timed) and attended per head; for a decode row that means expanding the whole context. Times on a busy
machine mislead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.kernels import _native
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.spec.model import AttentionSpec, RopeSpec
from coterie.spec.weights import F32, MatrixSpec

NOPE, ROPE, RANK, VALUE = 128, 64, 512, 128
PAGE = 64


def mla(heads: int) -> AttentionSpec:
    rope = RopeSpec(ROPE, 1e4, interleaved=True)
    return AttentionSpec("mla", heads, heads, NOPE + ROPE, VALUE, (NOPE + ROPE) ** -0.5, rope, NOPE, ROPE, None, RANK)


def gqa(heads: int, groups: int, key: int, value: int) -> AttentionSpec:
    return AttentionSpec("gqa", heads, groups, key, value, key**-0.5, RopeSpec(key, 1e4, interleaved=False))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def batch_of(context: int, rows: int) -> ForwardBatch:
    """The last `rows` of a context whose pages lie in order."""
    positions = np.arange(context - rows, context)
    return ForwardBatch(
        token_ids=np.zeros(rows, np.int32),
        positions=positions.astype(np.int32),
        query_start=np.array([0, rows], np.int32),
        context_lens=np.array([context], np.int32),
        logit_rows=np.zeros(0, np.int32),
        block_tables=np.arange(-(-context // PAGE), dtype=np.int32)[None],
        slot_mapping=positions.astype(np.int64),
        page_size=PAGE,
    )


def cached(kernels: NativeKernels, spec: AttentionSpec, kind: Any, context: int, rows: int) -> Callable[[], Any]:
    """Attention of the last rows over a filled cache."""
    whole = kernels.prepare(batch_of(context, context))
    caches = [kernels.allocate_cache(-(-context // PAGE) * PAGE, stream, kind) for stream in spec.cache_streams]
    for cache, stream in zip(caches, spec.cache_streams, strict=True):
        kernels.cache_write(cache, normal(context, stream.width), whole, stream)
    query = normal(rows, spec.num_heads, spec.latent_width if spec.kind == "mla" else spec.qk_head_dim)
    batch = kernels.prepare(batch_of(context, rows))
    return lambda: kernels.attend(query, caches[0], caches[1] if caches[1:] else None, batch, spec)


def expanded(kernels: NativeKernels, heads: int, kind: Any, context: int, rows: int) -> Callable[[], Any]:
    """The product that makes every head's keys and values, then attention per head."""
    (bank,) = kernels.allocate(1, MatrixSpec(heads * (NOPE + VALUE), RANK, F32))
    kernels.fill(bank, 0, 0, normal(heads * (NOPE + VALUE), RANK))
    latent = normal(context, RANK)
    attend = cached(kernels, gqa(heads, heads, NOPE + ROPE, VALUE), kind, context, rows)

    def run() -> None:
        kernels.linear(latent, bank)
        attend()

    return run


def fastest(call: Callable[[], Any], seconds: float = 1.0) -> float:
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kind", choices=["f32", "bf16", "int8"], default="bf16")
    parser.add_argument("--isa", choices=_native.isa_levels(), help="default: the best")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048])
    options = parser.parse_args()
    kernels = NativeKernels(options.threads, options.isa)
    probe = _native.Device(options.threads, kernels.isa)
    heads = options.heads
    print(f"{kernels.isa}, {options.threads} threads, {options.kind} cache")
    results, rate = [], 0.0
    for context in options.contexts:
        for rows in (1, context):
            pairs = sum(range(context - rows + 1, context + 1)) * heads
            latent, per_head = 2 * pairs * (2 * RANK + ROPE), 2 * pairs * (NOPE + ROPE + VALUE)
            expansion = 2 * context * RANK * heads * (NOPE + VALUE)
            cases: dict[str, tuple[float, Callable[[], Any]]] = {
                "absorbed": (latent, cached(kernels, mla(heads), options.kind, context, rows)),
                "expanded": (per_head + expansion, expanded(kernels, heads, options.kind, context, rows)),
                "gqa, 8 heads a group": (
                    2 * pairs * 256,
                    cached(kernels, gqa(heads, max(1, heads // 8), 128, 128), options.kind, context, rows),
                ),
            }
            for name, (operations, call) in cases.items():
                rate = max(rate, *probe.probe("f32", 1 << 24, 10))
                results.append((name, context, rows, operations, fastest(call)))
    print(f"f32 multiply-adds: {rate / 1e9:.0f} GFLOP/s\n")
    print("| form | context | rows | GFLOP | ms | share of f32 rate |\n|---|---|---|---|---|---|")
    for name, context, rows, operations, taken in results:
        share = operations / taken / rate
        print(f"| {name} | {context} | {rows} | {operations / 1e9:.3f} | {taken * 1e3:.3f} | {share:.2f} |")


if __name__ == "__main__":
    main()
