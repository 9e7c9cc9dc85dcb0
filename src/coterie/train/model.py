"""The model under training: fresh weights, the same Transformer and MTPBlock that serve, and their losses.

Nothing here is a second forward: `LanguageModel.hidden` drives the stages that inference drives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from coterie.comm.local import LocalTransport
from coterie.kernels.batch import ForwardBatch
from coterie.model.mtp import MTPBlock
from coterie.model.names import weight_layout
from coterie.model.overlap import drive
from coterie.model.transformer import Runtime, Transformer
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.model import ModelSpec, MoESpec
from coterie.spec.weights import F32, MatrixSpec
from coterie.train.functions import HeadLoss
from coterie.train.kernels import TrainKernels

Weights = dict[str, Tensor]


def new_weights(spec: ModelSpec, kernels: TrainKernels, seed: int) -> Weights:
    """Random weights by bank key: normal, 0.5/sqrt(fan-in), embedding 0.02; projections back to the residual zero."""
    layout = weight_layout(spec)
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for key, bank in layout.banks.items():
        (weight,) = kernels.allocate(bank.count, MatrixSpec(bank.rows, bank.cols, F32))
        deviation = 0.02 if key in ("embed", "head") else 0.5 / math.sqrt(bank.cols)
        if not key.endswith((".o", ".down")):
            weight.data.normal_(0, deviation, generator=generator)
        weights[key] = weight
    for key, size in layout.vectors.items():
        if key.endswith("correction_bias"):
            weights[key] = torch.zeros(size)
        elif key.endswith(".bias"):
            weights[key] = kernels.vector(np.zeros(size, np.float32))
        else:
            weights[key] = kernels.vector(np.ones(size, np.float32))
    return weights


def routed_layers(spec: ModelSpec) -> list[tuple[int, str, MoESpec]]:
    """(row index in the load record, key, MoESpec) of every layer that routes, the MTP block's last."""
    found = [(index, f"layers.{index}.ffn", moe) for index, moe in spec.moe_layers()]
    for depth, layer in enumerate(spec.mtp_layers):
        if isinstance(layer.ffn, MoESpec):
            found.append((len(spec.layers) + depth, f"mtp.{depth}.layer.ffn", layer.ffn))
    return found


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean cross entropies in nats per token: next token, and the one after it by the MTP block."""

    main: Tensor
    mtp: Tensor


class LanguageModel:
    """Transformer and MTP block over one mapping of weights; `load` counts the tokens of every expert."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: TrainKernels) -> None:
        self.spec, self.weights, self.kernels = spec, weights, kernels
        routed = routed_layers(spec)
        self.load = ExpertLoad([index for index, _, _ in routed], routed[0][2].num_experts, kernels.to_host)
        runtime = Runtime(kernels, LocalTransport(), StageTimer(), self.load)
        self.main = Transformer(spec, weights, runtime)
        self.mtp = MTPBlock(self.main, weights, 0)

    @property
    def head(self) -> Tensor:
        """The output projection [vocab, H]."""
        return self.weights["embed" if self.spec.tie_embeddings else "head"][0]

    def hidden(self, tokens: NDArray[np.int64], following: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Equal sequences [B, S] and the token after each -> states [B * S, H] of the model and of its MTP block."""
        batch = self.kernels.prepare(ForwardBatch.packed(tokens.reshape(-1), np.full(len(tokens), tokens.shape[1])))
        states = drive(self.main.stages(batch))
        return states, drive(self.mtp.stages(states, torch.from_numpy(following.reshape(-1)), batch))

    def losses(self, windows: NDArray[np.int64]) -> Losses:
        """Mean losses of windows [B, S + 2]: inputs, next tokens, the tokens after those."""
        inputs, first, second = windows[:, :-2], windows[:, 1:-1], windows[:, 2:]
        states, ahead = self.hidden(np.ascontiguousarray(inputs), np.ascontiguousarray(first))
        main = HeadLoss.apply(states, self.head, torch.from_numpy(first.reshape(-1)))
        mtp = HeadLoss.apply(ahead, self.head, torch.from_numpy(second.reshape(-1)))
        return Losses(main / inputs.size, mtp / inputs.size)


def trainable(weights: Weights) -> dict[str, Parameter]:
    """The weights that have gradients."""
    return {key: weight for key, weight in weights.items() if isinstance(weight, Parameter)}
