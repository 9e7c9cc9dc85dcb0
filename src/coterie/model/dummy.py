"""Random weights from a config alone (`--load-format dummy`): to try shapes, speed and memory without a download.

Matrices are N(0, 1 / fan_in), norms 1 + noise, biases small, so activations stay finite at any depth. A tensor's values
depend on (seed, its name) only. Large tensors are cut at random places out of one pool of normals, which is far faster
than drawing every value. The output of such a model has no meaning.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from coterie.kernels.api import HostArray, Kernels
from coterie.model.banks import BankFiller, RoleNeed, memory_needs, must_be_whole
from coterie.model.load_options import AS_STORED, LoadOptions
from coterie.model.load_plan import bank_formats, tied_head_differs
from coterie.model.names import TensorEntry, own_head, weight_layout
from coterie.spec.cache import CacheKind
from coterie.spec.model import ModelSpec
from coterie.spec.weights import BF16, WeightFormat

POOL_VALUES = 1 << 21
DRAWN_VALUES = 1 << 16
"""Tensors up to this size are drawn value by value."""
PIECE_VALUES = 1 << 20
NORM_NOISE, BIAS_STD = 0.1, 0.02


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """`nbytes`: memory of the weights as stored."""

    weights: dict[str, Any]
    kind: CacheKind
    tensors: int
    nbytes: int
    needs: tuple[RoleNeed, ...]


def dummy_weights(
    spec: ModelSpec,
    kernels: Kernels,
    options: LoadOptions = AS_STORED,
    *,
    admit: Callable[[tuple[RoleNeed, ...]], None] = lambda needs: None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> DummyWeights:
    """Fill every bank and vector of `spec`. `admit` may refuse what they need; `on_progress(bytes, of, tensor)`."""
    dtype, quant, seed = options.dtype, options.quant, options.seed
    if dtype == "auto":
        plain = spec.quantization is None and spec.dtype in ("float32", "float16")
        dtype = "float32" if plain else "bfloat16"
    layout = weight_layout(spec, mtp=options.mtp)
    if tied_head_differs(spec, quant):
        own_head(layout)
    formats = bank_formats(layout, dtype, {}, quant)
    needs = memory_needs(layout if options.shard is None else options.shard.needed(layout), formats)
    if options.shard is not None:
        layout = options.shard.layout(layout)
    admit(needs)
    filler = BankFiller(kernels, layout, formats, None if options.shard is None else options.shard.held)
    pool = _Pool(seed)
    sizes = {name: _stored_bytes(entry, formats) for name, entry in layout.tensors.items()}
    total, done = sum(sizes.values()), 0
    for name, entry in layout.tensors.items():
        for row, values in _tensor(name, entry, seed, pool):
            filler.put(entry, row, values)
        done += sizes[name]
        if on_progress is not None:
            on_progress(done, total, name)
    return DummyWeights(filler.weights, "f32" if dtype == "float32" else "bf16", len(layout.tensors), total, needs)


def _stored_bytes(entry: TensorEntry, formats: dict[str, WeightFormat]) -> int:
    return prod(entry.shape) * (2 if formats.get(entry.parts[0].bank) == BF16 else 4)


class _Pool:
    """Normals to cut large tensors from, drawn when first needed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._values: HostArray | None = None

    def cut(self, count: int, random: np.random.Generator) -> HostArray:
        """`count` values in runs that start at random places."""
        if self._values is None:
            self._values = np.random.default_rng([self.seed, 1]).standard_normal(POOL_VALUES, np.float32)
        out = np.empty(count, np.float32)
        at = 0
        while at < count:
            start = int(random.integers(POOL_VALUES // 2))
            run = min(count - at, POOL_VALUES - start, int(random.integers(POOL_VALUES // 8, POOL_VALUES // 2)))
            out[at : at + run] = self._values[start : start + run]
            at += run
        return out


def _tensor(name: str, entry: TensorEntry, seed: int, pool: _Pool) -> Iterator[tuple[int, HostArray]]:
    """(first row, values [n, cols]) pieces of one tensor."""
    random = np.random.default_rng([seed, 0, zlib.crc32(name.encode())])
    if len(entry.shape) == 1:
        noise = random.standard_normal(entry.shape[0], np.float32)[None]
        is_bias = name.endswith("bias")
        yield 0, noise * np.float32(BIAS_STD) if is_bias else 1 + noise * np.float32(NORM_NOISE)
        return
    rows, cols = entry.shape
    scale = np.float32(cols**-0.5)
    step = rows if must_be_whole(entry) else max(1, PIECE_VALUES // cols)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        small = rows * cols <= DRAWN_VALUES
        values = random.standard_normal(count * cols, np.float32) if small else pool.cut(count * cols, random)
        values *= scale
        yield row, values.reshape(count, cols)
