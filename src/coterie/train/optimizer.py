"""Muon for matrices, AdamW for the rest; the whole state is a flat mapping of tensors that a checkpoint can hold.

Muon (Jordan et al. 2024, with the RMS matching of arXiv 2502.16982): momentum, made orthogonal by five Newton-Schulz
steps, scaled by 0.2 sqrt(max(rows, cols)) so that it moves weights about as far as AdamW would. Matrices of one shape
are handled as one batch, each expert's gate and up apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from coterie.train.config import Optimiser

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def is_matrix(key: str) -> bool:
    """Whether Muon trains this bank: all matrices but embedding, head and routers."""
    return key not in ("embed", "head") and not key.endswith((".gate", "norm", ".bias"))


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices of [n, rows, cols], roughly: singular values near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2).contiguous() if tall else x
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True).bfloat16() + 1e-7)
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Updates the parameters in place; `state` is everything a resumed run needs."""

    def __init__(self, parameters: Mapping[str, Parameter], plan: Optimiser) -> None:
        self.plan, self.parameters = plan, dict(parameters)
        groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._keys: dict[tuple[int, int], list[str]] = defaultdict(list)
        self._adam = [key for key, value in parameters.items() if not (value.dim() == 3 and is_matrix(key))]
        for key, value in parameters.items():
            if key not in self._adam:
                view = _matrices(key, value)
                groups[view.shape[1], view.shape[2]].append(view)
                self._keys[view.shape[1], view.shape[2]].append(key)
        self.state: dict[str, Tensor] = {}
        for (rows, cols), views in groups.items():
            count = sum(len(view) for view in views)
            self.state[f"muon.{rows}x{cols}"] = torch.zeros(count, rows, cols)
        for key in self._adam:
            self.state[f"adam.first.{key}"] = torch.zeros_like(parameters[key].data)
            self.state[f"adam.second.{key}"] = torch.zeros_like(parameters[key].data)

    def clip(self) -> float:
        """Scale all gradients so that their global norm is at most `plan.clip`; return the norm before."""
        grads = [value.grad for value in self.parameters.values() if value.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        scale = self.plan.clip / (float(norm) + 1e-6)
        if scale < 1:
            torch._foreach_mul_(grads, scale)
        return float(norm)

    def step(self, number: int, rate: float) -> None:
        """Apply update `number` (from 1) with learning rates scaled by `rate`, and drop the gradients."""
        with torch.no_grad():
            for (rows, cols), keys in self._keys.items():
                self._muon(self.state[f"muon.{rows}x{cols}"], keys, rate)
            for key in self._adam:
                self._adamw(key, number, rate)
        for value in self.parameters.values():
            value.grad = None

    def _muon(self, momentum: Tensor, keys: list[str], rate: float) -> None:
        plan = self.plan
        gradient = torch.cat([_matrices(key, _gradient(self.parameters[key])) for key in keys])
        momentum.lerp_(gradient, 1 - plan.muon_momentum)
        direction = orthogonalise(gradient.lerp_(momentum, plan.muon_momentum)).float()
        step = rate * plan.muon_rate * 0.2 * math.sqrt(max(momentum.shape[1:]))
        first = 0
        for key in keys:
            target = _matrices(key, self.parameters[key].data)
            target.mul_(1 - rate * plan.muon_rate * plan.weight_decay)
            target.sub_(direction[first : first + len(target)], alpha=step)
            first += len(target)

    def _adamw(self, key: str, number: int, rate: float) -> None:
        plan, value = self.plan, self.parameters[key]
        gradient = _gradient(value)
        first, second = self.state[f"adam.first.{key}"], self.state[f"adam.second.{key}"]
        first.lerp_(gradient, 1 - plan.adam_beta1)
        second.mul_(plan.adam_beta2).addcmul_(gradient, gradient, value=1 - plan.adam_beta2)
        scale = second.div(1 - plan.adam_beta2**number).sqrt_().add_(1e-10)
        if value.dim() == 3:
            value.data.mul_(1 - rate * plan.adam_rate * plan.weight_decay)
        value.data.addcdiv_(first, scale, value=-rate * plan.adam_rate / (1 - plan.adam_beta1**number))


def _gradient(value: Parameter) -> Tensor:
    return torch.zeros_like(value.data) if value.grad is None else value.grad


def _matrices(key: str, value: Tensor) -> Tensor:
    """A bank as the matrices that Muon treats one by one: gate and up of a fused bank apart."""
    if key.endswith("gate_up"):
        return value.reshape(value.shape[0] * 2, -1, value.shape[2])
    return value
