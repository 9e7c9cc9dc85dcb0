"""Tensor parallelism is exact: every family, format, cache and batch has the bits of one rank on 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensor_ranks import FAMILIES, Model, Sequences, family, run_steps

from coterie.kernels import _native
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import SpecError
from coterie.spec.model import ModelSpec
from coterie.spec.tensor_split import TensorSplit, check_tensor_split
from coterie.spec.weights import QuantPlan

DUMMY = {"load_format": "dummy", "seed": 5}
LENGTHS = (23, 9, 1)
CHUNKS = [[(0, 0, 13)], [(1, 0, 8), (0, 13, 22), (2, 0, 1)], [(0, 22, 23), (1, 8, 9)], []]
"""A prompt in two chunks, another beside it, decode rows, nothing."""


def steps_of(sequences: Sequences, groups: int = 1) -> list[list[Any]]:
    return [[sequences.step(parts)] * groups for parts in CHUNKS]


def assert_equal(model: Model, tp: int, micro_batches: int = 1) -> list[Any]:
    sequences = Sequences(LENGTHS, min(model.spec.vocab_size, 500))
    blocks, steps = sequences.num_blocks, steps_of(sequences)
    expected = run_steps(model.ranks(1, 1, blocks), 1, steps)
    found = run_steps(model.ranks(1, tp, blocks), tp, steps, micro_batches)
    for before, after in zip(expected, found, strict=True):
        for one, many in zip(before[0], after[0], strict=True):
            np.testing.assert_array_equal(many, one)
    assert expected[0][0][0].shape == (13, model.spec.hidden_size) and np.abs(expected[0][0][1]).max() > 0.01
    return expected


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_bits_of_one_rank(name: str, tp: int) -> None:
    assert_equal(Model(family(name), NativeKernels(1), DUMMY), tp)


QUANTS = {
    "int8": QuantPlan("int8", "int8", "int8"),
    "int4": QuantPlan("int4", "int4", "int4", group=16),
    "fp8 experts": QuantPlan("fp8"),
    "mxfp4 experts": QuantPlan("mxfp4", "int8"),
}


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", ["mla q_lora", "gqa qkv bias, shared gate", "dense, tied"])
def test_quantised_weights(name: str, quant: str) -> None:
    assert_equal(Model(family(name), NativeKernels(1), {**DUMMY, "quant": QUANTS[quant]}, cache="int8"), 2)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("name", ["mla q_lora", "gqa qkv bias, shared gate"])
def test_rows_that_travel_narrow(name: str, dp: int, micro_batches: int) -> None:
    """int8 rows out and bf16 outputs back: the bits of one rank, which rounds too; on four groups, or on one of two."""
    options = {**DUMMY, "quant": QUANTS["int8"]}
    narrow = Model(family(name), NativeKernels(1), options, exchange_dtype="bfloat16")
    if dp == 1:
        rounded = assert_equal(narrow, 2, micro_batches)
        plain = assert_equal(Model(family(name), NativeKernels(1), options), 2)
        assert rounded[0][0][0].tobytes() != plain[0][0][0].tobytes(), "one rank rounds too"
        return
    sequences = Sequences(LENGTHS, 133)
    alone = run_steps(narrow.ranks(1, 1, sequences.num_blocks), 1, steps_of(sequences))
    found = run_steps(narrow.ranks(dp, 1, sequences.num_blocks), 1, steps_of(sequences, dp), micro_batches)
    for (one,), many in zip(alone, found, strict=True):
        for hidden, logits in many:
            np.testing.assert_array_equal(hidden, one[0])
            np.testing.assert_array_equal(logits, one[1])


@pytest.mark.parametrize("isa", [*_native.isa_levels(), "amx-emulated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mla single query", "gqa norms"])
def test_every_level(name: str, isa: str, dtype: str) -> None:
    if isa == "amx-emulated" and "avx512" not in _native.isa_levels():
        pytest.skip("no AVX-512 here")
    cache = "f32" if dtype == "float32" else "bf16"
    assert_equal(Model(family(name), NativeKernels(2, isa), {**DUMMY, "dtype": dtype}, cache=cache), 4)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_shipped_model(tp: int, micro_batches: int) -> None:
    path = Path(shipped_model_path())
    assert_equal(Model(ModelSpec.from_hf(path), NativeKernels(1), {}, path), tp, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["mla q_lora", "gqa norms"])
def test_two_groups_of_two_with_different_requests(name: str, micro_batches: int) -> None:
    """dp 2 x tp 2: experts on all four ranks; a group without work takes part; each row is routed once."""
    spec = family(name)
    model, groups = Model(spec, NativeKernels(1), DUMMY), [Sequences((14, 3)), Sequences((1, 25))]
    parts = [
        [[(0, 0, 14)], []],
        [[(1, 0, 3)], [(1, 0, 25)]],
        [[], [(0, 0, 1)]],
        [[], []],
    ]
    batches = [[g.step(p) for g, p in zip(groups, step, strict=True)] for step in parts]
    blocks = max(group.num_blocks for group in groups)
    ranks = model.ranks(2, 2, blocks)
    found = run_steps(ranks, 2, batches, micro_batches)
    total = sum(batch.num_tokens for step in batches for batch in step)
    counted = sum(rank.model.runtime.load.read().sum() for rank in ranks)
    moe = [moe for _, moe in spec.moe_layers()]
    assert counted == total * moe[0].top_k * len(moe) > 0
    for number in range(2):
        alone = run_steps(model.ranks(1, 1, blocks), 1, [[step[number]] for step in batches])
        for step, (hidden, logits) in enumerate(out[0] for out in alone):
            np.testing.assert_array_equal(found[step][number][0], hidden)
            np.testing.assert_array_equal(found[step][number][1], logits)


def test_the_reference_backend_agrees() -> None:
    spec, sequences = family("mla q_lora"), Sequences(LENGTHS)
    model = Model(spec, ReferenceKernels(), {**DUMMY, "dtype": "float32"}, cache="f32")
    steps = steps_of(sequences)[:3]
    one, two = (run_steps(model.ranks(1, tp, sequences.num_blocks), tp, steps) for tp in (1, 2))
    for before, after in zip(one, two, strict=True):
        np.testing.assert_allclose(after[0][1], before[0][1], atol=1e-4)


def test_a_rank_caches_only_the_key_heads_that_it_reads() -> None:
    spec = family("gqa norms")
    local = TensorSplit(1, 2).local(spec)
    assert local.cache_bytes_per_token("bf16") * 2 == spec.cache_bytes_per_token("bf16")
    assert TensorSplit(3, 4).attention(spec.layers[0].attention).num_kv_heads == 1
    assert [TensorSplit(rank, 4).key_heads(2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    mla = family("mla q_lora")
    assert TensorSplit(1, 2).local(mla).cache_bytes_per_token("bf16") == mla.cache_bytes_per_token("bf16")


def test_columns_are_cut_at_panels_or_not_at_all() -> None:
    assert TensorSplit(0, 2).all_columns(160) == ((0, 96), (96, 160)), "the first rank has most"
    assert TensorSplit(0, 4).all_columns(133) == ((0, 64), (64, 96), (96, 128), (128, 133))
    assert TensorSplit(2, 4).columns(96) == (0, 96), "three panels for four ranks"
    assert TensorSplit(2, 3).rows(1) == ((0, 0), (0, 0), (0, 1))


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("mla q_lora", 3, r"tp 3 does not divide the attention heads of this model \(4\); tp can be 1, 2, 4$"),
        ("mla q_lora", 8, "tp can be 1, 2, 4$"),
        ("gqa norms", 3, r"\(4 over 2 of keys\); tp can be 1, 2, 4$"),
    ],
)
def test_heads_that_do_not_divide_are_refused(name: str, size: int, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        check_tensor_split(family(name), size)
    check_tensor_split(family(name), 2)
