"""Trainer: one run from its plan to its last step. Deterministic on one machine; a resumed run is the same run.

One step: batch by number -> losses through the model's own stages -> backward -> clip -> Muon and AdamW -> correction
biases from exact counts. Not here: showing progress, evaluation, export (`train/run.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.train.balance import update_bias, violation
from coterie.train.checkpoint import Point, RunState, has_checkpoint, load_checkpoint, recipe_key, save_checkpoint
from coterie.train.config import Recipe, Schedule, model_spec
from coterie.train.data import Batches, Corpus, stage_length
from coterie.train.kernels import COMPUTE_TYPES, TrainKernels
from coterie.train.model import LanguageModel, new_weights, routed_layers, trainable
from coterie.train.optimizer import Optimizer


class TrainingError(CoterieError):
    """A run that cannot go on."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the schedule says about one step."""

    learning: float
    mtp_weight: float
    bias_speed: float


def rates_at(schedule: Schedule, step: int, total: int) -> Rates:
    """Warm-up, a plateau, then a line to zero; MTP weight and bias speed go from their first to their final value."""
    done = step / total
    warm = min(1.0, (step + 1) / max(schedule.warmup_steps, 1))
    fall = 1.0 if done < schedule.stable else (1 - done) / (1 - schedule.stable)
    speed = schedule.bias_speed + (schedule.bias_speed_final - schedule.bias_speed) * done
    return Rates(
        learning=min(warm, fall),
        mtp_weight=schedule.mtp_weight + (schedule.mtp_weight_final - schedule.mtp_weight) * done,
        bias_speed=speed if done < schedule.bias_stop else 0.0,
    )


class Trainer:
    """A run in memory. `state` says where it stands; `step()` advances it."""

    def __init__(self, recipe: Recipe, corpus: Corpus, total_steps: int | None = None) -> None:
        schedule = recipe.schedule
        torch.set_num_threads(recipe.machine.threads)
        self.recipe = recipe
        self.spec: ModelSpec = model_spec(recipe.model)
        self.kernels = TrainKernels(COMPUTE_TYPES[recipe.machine.compute], schedule.sequence_balance)
        self.weights = new_weights(self.spec, self.kernels, recipe.seed)
        self.model = LanguageModel(self.spec, self.weights, self.kernels)
        self.optimizer = Optimizer(trainable(self.weights), recipe.optimiser)
        streams = [register.train for register in corpus.registers] + [corpus.chat]
        self.batches = Batches(streams, recipe.seed, schedule.tokens_per_step)
        steps = total_steps or max(1, schedule.tokens // schedule.tokens_per_step)
        self.state = RunState(recipe_key(recipe), steps)
        self._counted = self.model.load.read()

    @property
    def finished(self) -> bool:
        return self.state.step >= self.state.total_steps

    def step(self) -> Point:
        """Run one optimiser step and record it. Raises `TrainingError` if the loss is no longer a number."""
        begun = perf_counter()
        state, schedule = self.state, self.recipe.schedule
        rates = rates_at(schedule, state.step, state.total_steps)
        length = stage_length(schedule.stages, state.step, state.total_steps)
        losses = self.model.losses(self.batches.batch(state.step, length))
        (losses.main + rates.mtp_weight * losses.mtp).backward()
        loss, mtp_loss = float(losses.main.detach()), float(losses.mtp.detach())
        norm = self.optimizer.clip()
        if not math.isfinite(loss + mtp_loss + norm):
            raise TrainingError(
                f"step {state.step}: loss {loss}, MTP loss {mtp_loss}, gradient norm {norm}; lower the rates"
            )
        self.optimizer.step(state.step + 1, rates.learning)
        imbalance = self._balance(rates.bias_speed)
        seconds = perf_counter() - begun
        point = Point(state.step, loss, mtp_loss, norm, imbalance, schedule.tokens_per_step / seconds)
        state.step += 1
        state.seconds += seconds
        state.history.append(point)
        return point

    def _balance(self, speed: float) -> float:
        """Move the correction biases by this step's counts; return the load violation."""
        totals = self.model.load.read()
        counts, self._counted = totals - self._counted, totals
        if speed > 0:
            for row, (_, key, _) in enumerate(routed_layers(self.spec)):
                update_bias(self.weights[f"{key}.correction_bias"], counts[row], speed)
        return violation(counts)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a continuation needs that is a tensor."""
        named = {f"weights.{key}": weight for key, weight in self.weights.items()}
        return named | {f"optimizer.{key}": tensor for key, tensor in self.optimizer.state.items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        save_checkpoint(folder, self.state, self.tensors())

    def resume(self, folder: Path) -> bool:
        """Continue from a checkpoint if there is one."""
        if not has_checkpoint(folder):
            return False
        self.state = load_checkpoint(folder, self.recipe, self.tensors())
        return True
