"""Shared helpers of the kernel tests: random inputs, the same bank on two backends, paged layouts. No tests here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.kernels import _native
from coterie.kernels.api import Kernels, Prepared
from coterie.kernels.batch import ForwardBatch
from coterie.spec.cache import CacheKind, CacheStream
from coterie.spec.model import AttentionSpec, RopeSpec
from coterie.spec.weights import BF16, F32, MatrixSpec

ISAS = tuple(_native.isa_levels())
LEVELS = (*ISAS, "amx-emulated") if "avx512" in ISAS else ISAS
"""With the tile kernels on emulated tiles: for tests of products and attention, whatever the processor."""
KINDS: tuple[CacheKind, ...] = ("f32", "bf16")
Floats = NDArray[np.float32]


def normal(seed: int, *shape: int, scale: float = 1.0) -> Floats:
    """Standard normal float32 values, the same for a seed."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


FORMATS = {"f32": F32, "bf16": BF16}


def new_bank(kernels: Kernels, count: int, rows: int, cols: int, kind: str, segments: int = 1) -> Any:
    """An empty bank of a kind without scales."""
    (bank,) = kernels.allocate(count, MatrixSpec(rows, cols, FORMATS[kind], segments))
    return bank


def make_bank(kernels: Kernels, values: Floats, kind: CacheKind, segments: int = 1) -> Any:
    """A bank of [count, rows, cols] values."""
    bank = new_bank(kernels, *values.shape, kind, segments)
    for index, matrix in enumerate(values):
        kernels.fill(bank, index, 0, matrix)
    return bank


def to_bf16(values: Floats) -> Floats:
    """Values rounded to the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def as_multiplied(isa: str, kind: str, x: Floats) -> Floats:
    """Activations as a level's products take them: AMX levels round them to bf16 before bf16 weights."""
    return to_bf16(x) if isa.startswith("amx") and kind == "bf16" else x


def attention_tolerance(isa: str, kind: CacheKind) -> float:
    """Of outputs of order one against float64: tiles round queries and softmax weights to bf16."""
    return 2e-2 if isa.startswith("amx") and kind != "f32" else 2e-5


def mla_spec(heads: int = 5, nope: int = 12, rope: int = 6, rank: int = 28, value: int = 10) -> AttentionSpec:
    return AttentionSpec(
        kind="mla",
        num_heads=heads,
        num_kv_heads=heads,
        qk_head_dim=nope + rope,
        v_head_dim=value,
        softmax_scale=(nope + rope) ** -0.5,
        rope=RopeSpec(dim=rope, theta=10000.0, interleaved=True),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        kv_lora_rank=rank,
    )


def gqa_spec(heads: int = 6, groups: int = 2, dim: int = 18, value: int = 13, rope: int = 18) -> AttentionSpec:
    return AttentionSpec(
        kind="gqa",
        num_heads=heads,
        num_kv_heads=groups,
        qk_head_dim=dim,
        v_head_dim=value,
        softmax_scale=dim**-0.5,
        rope=RopeSpec(dim=rope, theta=10000.0, interleaved=False),
        qk_norm=True,
    )


@dataclass(slots=True)
class PagedSequences:
    """Sequences of given lengths on shuffled pages, and batches over parts of them."""

    lengths: tuple[int, ...]
    page_size: int
    seed: int = 0
    tables: list[NDArray[np.int32]] = field(default_factory=list)
    num_blocks: int = 0

    def __post_init__(self) -> None:
        needs = [-(-length // self.page_size) for length in self.lengths]
        self.num_blocks = sum(needs) + 3
        order = np.random.default_rng(self.seed).permutation(self.num_blocks).astype(np.int32)
        ends = np.cumsum(needs)
        self.tables = [order[end - need : end] for need, end in zip(needs, ends, strict=True)]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.page_size

    def batch(self, parts: list[tuple[int, int, int]]) -> ForwardBatch:
        """Rows [begin, end) of a sequence for each (sequence, begin, end)."""
        positions = [np.arange(begin, end) for _, begin, end in parts]
        slots = [
            self.tables[s][p // self.page_size] * np.int64(self.page_size) + p % self.page_size
            for (s, _, _), p in zip(parts, positions, strict=True)
        ]
        width = max([len(self.tables[s]) for s, _, _ in parts], default=1)
        tables = np.full((len(parts), width), -1, np.int32)
        for row, (s, _, _) in enumerate(parts):
            tables[row, : len(self.tables[s])] = self.tables[s]
        flat = np.concatenate([*positions, np.zeros(0)]).astype(np.int32)
        return ForwardBatch(
            token_ids=np.zeros(len(flat), np.int32),
            positions=flat,
            query_start=np.cumsum([0] + [end - begin for _, begin, end in parts]).astype(np.int32),
            context_lens=np.array([end for _, _, end in parts], np.int32),
            logit_rows=np.zeros(0, np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate([*slots, np.zeros(0)]).astype(np.int64),
            page_size=self.page_size,
        )

    def whole(self) -> ForwardBatch:
        return self.batch([(s, 0, length) for s, length in enumerate(self.lengths)])


def plain_stream(rows: Any) -> CacheStream:
    """A stream that is as wide as these rows."""
    return CacheStream("rows", "append", rows.shape[1])


def fill_caches(
    kernels: Kernels, layout: PagedSequences, rows: list[Any], kind: CacheKind, spec: AttentionSpec | None = None
) -> tuple[list[Any], Prepared]:
    """One cache per array of rows, written through the whole layout. An int8 cache needs the spec."""
    batch = kernels.prepare(layout.whole())
    streams = spec.cache_streams if spec else [plain_stream(values) for values in rows]
    caches = []
    for values, stream in zip(rows, streams, strict=True):
        cache = kernels.allocate_cache(layout.num_slots, stream, kind)
        kernels.cache_write(cache, values, batch, stream)
        caches.append(cache)
    return caches, batch
