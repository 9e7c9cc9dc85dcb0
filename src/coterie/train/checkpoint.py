"""Checkpoints: one safetensors file and one JSON file, swapped in whole. Never pickle.

A resumed run continues bit for bit: weights, correction biases, optimiser state, step, plan and history are all here;
batches are a function of the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.spec.errors import CoterieError
from coterie.train.config import Recipe


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the history: losses in nats per token, gradient norm, load violation, tokens per second."""

    step: int
    loss: float
    mtp_loss: float
    gradient_norm: float
    violation: float
    tokens_per_second: float


@dataclass(slots=True)
class RunState:
    """Where a run stands. `total_steps` is its plan: learning rates and stages are fractions of it."""

    recipe_key: str
    total_steps: int
    step: int = 0
    seconds: float = 0.0
    history: list[Point] = field(default_factory=list)


def recipe_key(recipe: Recipe) -> str:
    """Identifies what must not change between a run and its continuation."""
    fixed = (recipe.model, recipe.data, recipe.optimiser, recipe.schedule, recipe.seed, recipe.machine.compute)
    return hashlib.sha256(repr(fixed).encode()).hexdigest()


def save_checkpoint(folder: Path, state: RunState, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint beside the last one, then put it in its place."""
    partial, old = folder.with_suffix(".partial"), folder.with_suffix(".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, partial / "state.safetensors")
    (partial / "state.json").write_text(json.dumps(asdict(state)) + "\n", "utf-8")
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to resume from (also after a crash between the two renames)."""
    return any((place / "state.json").is_file() for place in (folder, folder.with_suffix(".old")))


def load_checkpoint(folder: Path, recipe: Recipe, tensors: Mapping[str, Tensor]) -> RunState:
    """Fill `tensors` in place and return the state. Refuses a checkpoint of another recipe."""
    place = folder if (folder / "state.json").is_file() else folder.with_suffix(".old")
    state = msgspec.json.decode((place / "state.json").read_bytes(), type=RunState)
    if state.recipe_key != recipe_key(recipe):
        raise CoterieError(f"the checkpoint in {folder} is of another recipe; use its recipe, or another --out folder")
    stored = load_file(place / "state.safetensors")
    if stored.keys() != tensors.keys():
        raise CoterieError(f"the checkpoint in {folder} does not hold this model's tensors; use another --out folder")
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(stored[key])
    return state
