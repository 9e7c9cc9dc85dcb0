"""The int8 cache: both backends write the same bytes, attention over them agrees, and no row depends on another.

The oracle of an int8 cache is attention over its dequantised rows; how far those are from the rows is measured apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import ISAS, PagedSequences, fill_caches, gqa_spec, mla_spec, normal

from coterie.kernels.int8_rows import unpack_rows
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.spec.cache import CacheStream
from coterie.spec.model import AttentionSpec

SPECS = {
    "mla": mla_spec(5, 12, 6, 150, 10),
    "mla512": mla_spec(16, 16, 64, 512, 16),
    "gqa": gqa_spec(6, 2, 80, 70, 80),
    "gqa small": gqa_spec(3, 3, 18, 13, 18),
}


def cache_rows(spec: AttentionSpec, total: int) -> list[np.ndarray]:
    return [normal(seed, total, stream.width) for seed, stream in enumerate(spec.cache_streams)]


def decoded(packed: np.ndarray, stream: CacheStream) -> np.ndarray:
    """Float32 rows of a cache's bytes, written plainly."""
    ends, groups = stream.heads * stream.head_width, -(-stream.head_width // 64)
    codes = packed[:, :ends].view(np.int8).astype(np.float32).reshape(len(packed), stream.heads, -1)
    scales = packed[:, ends : ends + 4 * stream.heads * groups].copy().view(np.float32)
    scales = np.repeat(scales.reshape(len(packed), stream.heads, groups), 64, 2)[:, :, : stream.head_width]
    halves = packed[:, ends + 4 * stream.heads * groups :].copy().view(np.uint16)
    exact = (halves.astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([(codes * scales).reshape(len(packed), -1), exact], 1)


@pytest.mark.parametrize("name", SPECS)
def test_both_backends_write_the_same_bytes(name: str) -> None:
    spec, layout = SPECS[name], PagedSequences((70,), 16)
    rows = cache_rows(spec, 70)
    rows[0][3, :4] = (1e30, -1e-30, 0.0, 7.0)
    rows[0][4] = 0.0
    rows[0][5] = 1e-35
    mine, _ = fill_caches(NativeKernels(2), layout, rows, "int8", spec)
    theirs, _ = fill_caches(ReferenceKernels(), layout, [torch.from_numpy(r) for r in rows], "int8", spec)
    for native, reference, stream in zip(mine, theirs, spec.cache_streams, strict=True):
        assert native.dtype == np.uint8 and native.shape[1] == stream.row_bytes("int8")
        np.testing.assert_array_equal(native, reference.numpy())
        np.testing.assert_array_equal(unpack_rows(reference, stream).numpy(), decoded(native, stream))


@pytest.mark.parametrize("name", SPECS)
def test_a_normal_row_keeps_two_digits(name: str) -> None:
    """Rounding to a 127th of a group's largest magnitude: within half a step each, under 0.8 % of a normal row."""
    spec, layout = SPECS[name], PagedSequences((200,), 200)
    rows = cache_rows(spec, 200)
    caches, batch = fill_caches(NativeKernels(1), layout, rows, "int8", spec)
    assert batch.slot_mapping is not None
    for packed, values, stream in zip(caches, rows, spec.cache_streams, strict=True):
        got = decoded(packed[np.asarray(batch.slot_mapping)], stream)
        coded = stream.width - stream.exact
        error = np.linalg.norm(got[:, :coded] - values[:, :coded]) / np.linalg.norm(values[:, :coded])
        assert 0 < error < 0.008
        assert np.abs(got[:, coded:] - values[:, coded:]).max(initial=0) < 2**-8 * 5
        step = np.abs(values).max(1, keepdims=True) / 127
        assert (np.abs(got - values)[:, :coded] <= step / 2 * 1.001).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_spoils_its_group_alone(value: float) -> None:
    spec, layout = SPECS["mla"], PagedSequences((3,), 4)
    rows = cache_rows(spec, 3)
    rows[0][1, 70] = value
    for kernels in (NativeKernels(1), ReferenceKernels()):
        given = rows if kernels.name == "native" else [torch.from_numpy(r) for r in rows]
        caches, batch = fill_caches(kernels, layout, given, "int8", spec)
        got = decoded(np.asarray(caches[0])[np.asarray(batch.slot_mapping)], spec.cache_streams[0])
        assert np.isnan(got[1, 64:128]).all()
        assert np.isfinite(np.delete(got.reshape(-1), np.arange(156 + 64, 156 + 128))).all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("isa", ISAS)
def test_attention_equals_that_over_the_dequantised_rows(isa: str, name: str) -> None:
    """Bit for bit an f32 cache of the decoded values (tiles take both as bf16); within rounding the oracle."""
    spec, layout = SPECS[name], PagedSequences((300, 65), 16)
    rows, kernels = cache_rows(spec, 365), NativeKernels(2, isa)
    query = normal(9, 365, spec.num_heads, spec.latent_width if spec.kind == "mla" else spec.qk_head_dim, scale=1.5)
    caches, batch = fill_caches(kernels, layout, rows, "int8", spec)
    wide = [decoded(cache, stream) for cache, stream in zip(caches, spec.cache_streams, strict=True)]
    got = kernels.attend(query, caches[0], caches[1] if caches[1:] else None, batch, spec)
    same = kernels.attend(query, wide[0], wide[1] if wide[1:] else None, batch, spec)
    if not isa.startswith("amx"):
        assert got.tobytes() == same.tobytes()
    oracle = ReferenceKernels("float64")
    theirs, prepared = fill_caches(oracle, layout, [torch.from_numpy(r) for r in rows], "int8", spec)
    values = theirs[1] if theirs[1:] else None
    expected = oracle.attend(torch.from_numpy(query).double(), theirs[0], values, prepared, spec)
    error = np.linalg.norm(got - expected.numpy()) / np.linalg.norm(expected.numpy())
    assert error < (1e-2 if isa.startswith("amx") else 2e-6), "tiles round the dequantised rows to bf16 as well"


@pytest.mark.parametrize("chunk", [1, 37, 64])
@pytest.mark.parametrize("name", ["mla", "gqa"])
@pytest.mark.parametrize("isa", ISAS)
def test_chunks_equal_the_whole(isa: str, name: str, chunk: int) -> None:
    spec, layout, total = SPECS[name], PagedSequences((280,), 64), 280
    rows = cache_rows(spec, total)
    query = normal(9, total, spec.num_heads, spec.latent_width if spec.kind == "mla" else spec.qk_head_dim)
    kernels = NativeKernels(2, isa)
    caches, whole = fill_caches(kernels, layout, rows, "int8", spec)
    expected = kernels.attend(query, caches[0], caches[1] if caches[1:] else None, whole, spec)
    stale: list[Any] = [np.full_like(cache, 0xFF) for cache in caches]
    for begin in range(0, total, chunk):
        part = kernels.prepare(layout.batch([(0, begin, min(begin + chunk, total))]))
        at = slice(begin, begin + part.num_tokens)
        for cache, values, stream in zip(stale, rows, spec.cache_streams, strict=True):
            kernels.cache_write(cache, values[at], part, stream)
        got = kernels.attend(query[at], stale[0], stale[1] if stale[1:] else None, part, spec)
        assert got.tobytes() == expected[at].tobytes()


def test_rows_of_the_wrong_size_are_refused() -> None:
    spec, layout, kernels = SPECS["gqa"], PagedSequences((4,), 4), NativeKernels(1)
    key, value = spec.cache_streams
    batch = kernels.prepare(layout.whole())
    cache = kernels.allocate_cache(layout.num_slots, value, "int8")
    with pytest.raises(ValueError, match=r"cache_write: a stream \[16, 156\] has rows of 156, needs 176 for 160"):
        kernels.cache_write(cache, normal(1, 4, key.width), batch, key)
    with pytest.raises(ValueError, match="are not 2 equal heads and 0 more"):
        kernels.cache_write(cache, normal(1, 4, 7), batch, key)


def test_bytes_of_a_row() -> None:
    latent = mla_spec(16, 128, 64, 512, 128).cache_streams[0]
    assert [latent.row_bytes(kind) for kind in ("f32", "bf16", "int8")] == [2304, 1152, 512 + 8 * 4 + 64 * 2]
    key = gqa_spec(32, 4, 128, 128, 128).cache_streams[0]
    assert [key.row_bytes(kind) for kind in ("f32", "bf16", "int8")] == [2048, 1024, 512 + 4 * 2 * 4]
