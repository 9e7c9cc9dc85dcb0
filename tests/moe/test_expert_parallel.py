"""One MoE forward at any world size: N local ranks give each token exactly what one rank gives it."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.comm.local import LocalTransport
from coterie.kernels.batch import ForwardBatch
from coterie.model.overlap import drive_all
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts
from coterie.moe.layer import MoELayer
from coterie.moe.router import Router
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.model import MoESpec
from coterie.spec.weights import F32, MatrixSpec

HIDDEN, INNER, EXPERTS, TOP_K = 24, 10, 8, 3
SPEC = MoESpec(EXPERTS, TOP_K, INNER, scoring="sigmoid", correction_bias=True, normalize=True, norm_epsilon=1e-20)


def make_kernels(name: str):
    if name == "reference":
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        from coterie.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    from coterie.kernels.native import NativeKernels

    return NativeKernels()


def make_layer(kernels, transport: LocalTransport, load: ExpertLoad | None) -> MoELayer:
    """The layer of one rank: every rank draws the same weights and keeps its own experts."""
    rng = np.random.default_rng(7)

    def bank(count: int, rows: int, cols: int, keep: range | None = None, segments: int = 1):
        values = rng.normal(size=(count, rows, cols)).astype(np.float32) / np.sqrt(cols)
        keep = keep or range(count)
        (out,) = kernels.allocate(len(keep), MatrixSpec(rows, cols, F32, segments))
        for index, expert in enumerate(keep):
            kernels.fill(out, index, 0, values[expert].astype(np.float32))
        return out

    per_rank = EXPERTS // transport.size
    own = range(transport.rank * per_rank, (transport.rank + 1) * per_rank)
    gate = bank(1, EXPERTS, HIDDEN)
    bias = kernels.vector(rng.normal(size=EXPERTS).astype(np.float32))
    experts = Experts(bank(EXPERTS, 2 * INNER, HIDDEN, own, 2), bank(EXPERTS, HIDDEN, INNER, own), kernels)
    shared = Experts(bank(1, 2 * INNER, HIDDEN, None, 2), bank(1, HIDDEN, INNER), kernels)
    return MoELayer(
        0, Router(SPEC, gate, bias, kernels), Dispatcher(EXPERTS, transport, kernels), experts, shared, None, kernels,
        StageTimer(), load,
    )  # fmt: skip


def run(kernels, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Each rank's inputs [T_r, H] through the layer over a local group of len(inputs) ranks."""
    loads, generators = [], []
    for transport, x in zip(LocalTransport.group(len(inputs)), inputs, strict=True):
        load = ExpertLoad([0], EXPERTS, kernels.to_host)
        layer = make_layer(kernels, transport, load)
        batch = kernels.prepare(ForwardBatch.packed(np.zeros(len(x), np.int32), np.array([len(x)])))
        source = kernels.embed(embedding(kernels, x), batch.positions)
        generators.append(layer.stages(source, batch))
        loads.append(load)
    outputs = [kernels.to_host(out) for out in drive_all(generators)]
    return outputs, sum(load.read()[0] for load in loads)


def embedding(kernels, x: np.ndarray):
    """Backend rows equal to x, through the one op that makes rows from a table."""
    (bank,) = kernels.allocate(1, MatrixSpec(max(len(x), 1), HIDDEN, F32))
    kernels.fill(bank, 0, 0, x if len(x) else np.zeros((1, HIDDEN), np.float32))
    return bank


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("sizes", [(13,), (7, 6), (13, 0), (1, 0, 9, 3), (0, 0, 0, 13)])
def test_ranks_equal_one_rank(backend: str, sizes: tuple[int, ...]) -> None:
    kernels = make_kernels(backend)
    x = np.random.default_rng(3).normal(size=(sum(sizes), HIDDEN)).astype(np.float32)
    (whole,), counts_one = run(kernels, [x])
    parts = np.split(x, np.cumsum(sizes)[:-1])
    split, counts_many = run(kernels, parts)
    assert counts_one.sum() == len(x) * TOP_K
    np.testing.assert_array_equal(counts_one, counts_many)
    together = np.concatenate(split)
    assert np.abs(whole).max() > 0.1
    if backend == "native":
        np.testing.assert_array_equal(together, whole)
    else:
        np.testing.assert_allclose(together, whole, atol=1e-5)


def test_one_waiting_rank_is_an_error() -> None:
    kernels = make_kernels("native")
    first, _ = LocalTransport.group(2)
    layer = make_layer(kernels, first, None)
    batch = kernels.prepare(ForwardBatch.packed(np.zeros(1, np.int32), np.array([1])))
    with pytest.raises(AssertionError, match="every rank waits"):
        row = kernels.embed(embedding(kernels, np.ones((1, HIDDEN), np.float32)), batch.positions)
        drive_all([layer.stages(row, batch)])
