"""Held-out figures of a model: bits per byte per register, how its experts are used, how often the MTP block agrees.

The whole held-out text is read with overlapping windows: each token is scored once, with at least half a window before
it (except at the start). `<|eos|>` between documents is paid for but counts no bytes. Weights are rounded as shipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.spec.model import ModelSpec
from coterie.train.data import Register, Tokens
from coterie.train.kernels import TrainKernels
from coterie.train.model import LanguageModel, Weights
from coterie.train.tokenizer import BOS

ROWS = 8192


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """One register: bits per byte, MTP agreement with the model's own greedy token, tokens per (layer, expert)."""

    name: str
    bits_per_byte: float
    nats_per_token: float
    mtp_agreement: float
    expert_counts: list[list[int]]


def rounded(weights: Weights) -> Weights:
    """A copy with matrices rounded to bfloat16 as they are exported; vectors and routers stay float32."""
    copy: Weights = {}
    for key, weight in weights.items():
        value = weight.detach()
        narrow = value.dim() == 3 and not key.endswith(".gate")
        copy[key] = value.bfloat16().float() if narrow else value.clone()
    return copy


def evaluate(
    spec: ModelSpec,
    weights: Weights,
    registers: tuple[Register, ...],
    window: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[RegisterResult]:
    """Score every register's held-out tokens in float32 with windows of `window` tokens."""
    model = LanguageModel(spec, rounded(weights), TrainKernels(torch.float32))
    results = []
    with torch.inference_mode():
        for register in registers:
            progress(f"evaluating {register.name}")
            results.append(_one(model, register, window))
    return results


def windows_of(tokens: Tokens, window: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """[n, window + 1] rows `<|bos|>` + window tokens, and which of the window's tokens are scored there (each once)."""
    window = min(window, len(tokens))
    stride = max(window // 2, 1)
    starts = [*range(0, len(tokens) - window, stride), len(tokens) - window]
    rows = np.stack([np.concatenate([[BOS], tokens[start : start + window]]) for start in starts]).astype(np.int64)
    scored = np.zeros((len(starts), window), bool)
    done = 0
    for row, start in enumerate(starts):
        scored[row, done - start :] = True
        done = start + window
    return rows, scored


def _one(model: LanguageModel, register: Register, window: int) -> RegisterResult:
    rows, scored = windows_of(register.held, window)
    before = model.load.read()
    nats = 0.0
    agreed = compared = 0
    per_batch = max(1, ROWS // rows.shape[1])
    for first in range(0, len(rows), per_batch):
        part, wanted = rows[first : first + per_batch], scored[first : first + per_batch]
        states, ahead = model.hidden(np.ascontiguousarray(part[:, :-1]), np.ascontiguousarray(part[:, 1:]))
        loss, best = _score(model.head, states, torch.from_numpy(part[:, 1:].reshape(-1)))
        nats += float(loss.view(wanted.shape)[torch.from_numpy(wanted)].sum(dtype=torch.float64))
        _, guess = _score(model.head, ahead, None)
        best, guess = best.view(wanted.shape), guess.view(wanted.shape)
        mask = torch.from_numpy(wanted[:, 1:])
        agreed += int((guess[:, :-1] == best[:, 1:])[mask].sum())
        compared += int(mask.sum())
    return RegisterResult(
        name=register.name,
        bits_per_byte=nats / math.log(2) / register.held_bytes,
        nats_per_token=nats / len(register.held),
        mtp_agreement=agreed / max(compared, 1),
        expert_counts=(model.load.read() - before).tolist(),
    )


def _score(head: Tensor, states: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Per row: cross entropy against its target (empty without targets), and the most likely token."""
    losses, best = [], []
    for first in range(0, len(states), 1024):
        logits = states[first : first + 1024] @ head.t()
        best.append(logits.argmax(1))
        if targets is not None:
            losses.append(torch.nn.functional.cross_entropy(logits, targets[first : first + 1024], reduction="none"))
    return torch.cat(losses) if losses else states.new_zeros(0), torch.cat(best)
