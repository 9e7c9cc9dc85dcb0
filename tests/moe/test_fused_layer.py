"""MoELayer with the backend's fused op and without: the same bits, the same expert counts, the laps of its stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coterie.kernels import _native
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.overlap import drive_all
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts, FusedExperts
from coterie.moe.layer import MoELayer
from coterie.moe.router import Router
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.model import MoESpec
from coterie.spec.weights import BF16, F32, INT4_TABLE, MatrixSpec, WeightFormat

HIDDEN, INNER, SHARED, EXPERTS, TOP_K = 130, 70, 33, 12, 4
SPEC = MoESpec(EXPERTS, TOP_K, INNER, scoring="sigmoid", correction_bias=True, normalize=True, norm_epsilon=1e-20)
INT4 = WeightFormat("code4", 32, "f16", INT4_TABLE)
FORMATS = {"f32": F32, "bf16": BF16, "int8": WeightFormat("int8", 32), "int4": INT4}


def make_layer(kernels, format: WeightFormat, *, shared: bool, gated: bool) -> MoELayer:
    rng = np.random.default_rng(3)

    def bank(count: int, rows: int, cols: int, format: WeightFormat = format, segments: int = 1):
        (out,) = kernels.allocate(count, MatrixSpec(rows, cols, format, segments))
        for index in range(count):
            kernels.fill(out, index, 0, (rng.normal(size=(rows, cols)) / np.sqrt(cols)).astype(np.float32))
        return out

    router = Router(SPEC, bank(1, EXPERTS, HIDDEN, F32), kernels.vector(rng.normal(size=EXPERTS)), kernels)
    experts = Experts(bank(EXPERTS, 2 * INNER, HIDDEN, segments=2), bank(EXPERTS, HIDDEN, INNER), kernels)
    own = Experts(bank(1, 2 * SHARED, HIDDEN, segments=2), bank(1, HIDDEN, SHARED), kernels) if shared else None
    gate = bank(1, 1, HIDDEN, F32) if gated else None
    return MoELayer(
        0, router, Dispatcher(EXPERTS, kernels), experts, own, gate, kernels, StageTimer(),
        ExpertLoad([0], EXPERTS, kernels.to_host), FusedExperts.of(experts, own, gate),
    )  # fmt: skip


def run(layer: MoELayer, x: np.ndarray) -> np.ndarray:
    batch = layer.kernels.prepare(ForwardBatch.packed(np.zeros(len(x), np.int32), np.array([len(x)])))
    (out,) = drive_all([layer.stages(x, batch)])
    return out


@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", _native.isa_levels())
def test_fused_is_the_stages_bit_for_bit(isa: str, format: str, shared: str) -> None:
    fused = make_layer(NativeKernels(2, isa), FORMATS[format], shared=shared != "none", gated=shared == "gated")
    staged = replace(fused, fused=None, load=ExpertLoad([0], EXPERTS, fused.kernels.to_host))
    assert fused.fused is not None
    for tokens in (0, 1, 2, 65):
        x = np.random.default_rng(tokens).normal(size=(tokens, HIDDEN)).astype(np.float32)
        got, wanted = run(fused, x), run(staged, x)
        assert got.shape == wanted.shape and got.tobytes() == wanted.tobytes(), f"{tokens} tokens"
    assert fused.load is not None and staged.load is not None
    assert np.array_equal(fused.load.read(), staged.load.read())
    assert fused.load.read().sum() == 68 * TOP_K


def test_laps_and_backends() -> None:
    layer = make_layer(NativeKernels(1), F32, shared=True, gated=False)
    layer.timer.start()
    run(layer, np.ones((3, HIDDEN), np.float32))
    spent = layer.timer.totals_ns
    assert spent["router"] > 0 and spent["experts"] > 0 and spent["dispatch"] == spent["combine"] == 0
    assert make_layer(ReferenceKernels(), F32, shared=False, gated=False).fused is None
