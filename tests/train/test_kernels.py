"""Training kernels against the reference backend: the whole model in float32, and the ops that only training has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.train.tiny import write_recipe

from coterie.kernels.batch import ForwardBatch
from coterie.kernels.reference import ReferenceKernels
from coterie.model.mtp import MTPBlock
from coterie.model.names import weight_layout
from coterie.model.overlap import drive
from coterie.model.transformer import Runtime, Transformer
from coterie.spec.model import AttentionSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec
from coterie.spec.weights import F32, MatrixSpec
from coterie.train.config import load_recipe, model_spec
from coterie.train.kernels import TrainKernels
from coterie.train.model import new_weights

torch.set_num_threads(1)


def grouped_query(spec: ModelSpec) -> ModelSpec:
    attention = AttentionSpec("gqa", 4, 2, 8, 8, 8**-0.5, RopeSpec(8, 10000.0, interleaved=False), qk_norm=True)
    return replace(spec, layers=tuple(LayerSpec(attention, layer.ffn) for layer in spec.layers), mtp_layers=())


def routed(spec: ModelSpec, **rule: object) -> ModelSpec:
    def change(layer: LayerSpec) -> LayerSpec:
        ffn = layer.ffn
        return replace(layer, ffn=replace(ffn, **rule)) if isinstance(ffn, MoESpec) else layer  # type: ignore[arg-type]

    return replace(
        spec, layers=tuple(change(layer) for layer in spec.layers), mtp_layers=tuple(map(change, spec.mtp_layers))
    )


VARIANTS = {
    "plain": lambda spec: spec,
    "grouped query": grouped_query,
    "softmax": lambda spec: routed(spec, scoring="softmax", normalize=False, routed_scaling_factor=2.0),
    "groups by two best": lambda spec: routed(spec, num_groups=4, topk_groups=2, group_score="top2_sum"),
    "groups by maximum": lambda spec: routed(spec, num_groups=4, topk_groups=2, group_score="max"),
    "groups of one": lambda spec: routed(spec, num_groups=8, topk_groups=5, group_score="top2_sum"),
}


@pytest.mark.parametrize("lengths", [[40, 40], [3, 150, 1]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_equals_reference(tmp_path: Path, variant: str, lengths: list[int]) -> None:
    spec = VARIANTS[variant](model_spec(load_recipe(write_recipe(tmp_path)).model))
    ours, reference = TrainKernels(torch.float32), ReferenceKernels()
    weights = new_weights(spec, ours, seed=0)
    generator = torch.Generator().manual_seed(5)
    for weight in weights.values():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    layout = weight_layout(spec)
    theirs = {}
    for key, bank in layout.banks.items():
        (theirs[key],) = reference.allocate(bank.count, MatrixSpec(bank.rows, bank.cols, F32))
        for index in range(bank.count):
            reference.fill(theirs[key], index, 0, ours.read(weights[key], index))
    theirs |= {key: reference.vector(ours.to_host(weights[key])) for key in layout.vectors}
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, sum(lengths))
    batch = ForwardBatch.packed(ids, np.array(lengths))
    following = torch.from_numpy(np.roll(ids, -1))
    outputs = []
    for kernels, mapping in ((ours, weights), (reference, theirs)):
        model = Transformer(spec, mapping, Runtime.local(kernels))
        prepared = kernels.prepare(batch)
        hidden = drive(model.stages(prepared))
        outputs.append([model.logits(hidden)])
        if spec.mtp_layers:
            ahead = drive(MTPBlock(model, mapping, 0).stages(hidden, following, prepared))
            outputs[-1].append(model.logits(ahead))
    for mine, oracle in zip(*outputs, strict=True):
        assert oracle.abs().max() > 0.1
        torch.testing.assert_close(mine, oracle, rtol=1e-4, atol=1e-4)


def test_gather_is_indexing_bit_for_bit() -> None:
    kernels = TrainKernels(torch.float32)
    x = torch.randn(11, 6)
    order = kernels.sort_by_expert(torch.randint(0, 4, (11, 2)), 4)
    assert torch.equal(kernels.gather(x, order), x[order.token])


def test_sequence_balance_is_least_when_scores_and_counts_are_even() -> None:
    kernels = TrainKernels(torch.float32)
    kernels._sequences = 2
    spec = MoESpec(4, 2, 8, "sigmoid", normalize=True)
    even = kernels._sequence_balance(torch.full((4, 4), 0.5), torch.tensor([[0, 1], [2, 3]] * 2), spec)
    skewed = kernels._sequence_balance(torch.tensor([[0.9, 0.8, 0.1, 0.1]] * 4), torch.tensor([[0, 1]] * 4), spec)
    assert float(even) == pytest.approx(1.0)
    assert float(skewed) == pytest.approx(2 * 1.7 / 1.9, rel=1e-5)


def test_a_cache_is_refused_with_the_way_out() -> None:
    with pytest.raises(NotImplementedError, match="native or reference"):
        TrainKernels().allocate_cache(4, 8, "f32")
