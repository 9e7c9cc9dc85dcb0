"""A whole run as the command does it: prepare, train with progress and checkpoints, evaluate, export a model folder.

`OUT/` gets `checkpoint/`, `loss.png`, `evaluation.json` and `model/` (a Hugging Face folder for `coterie serve`).
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from coterie.model.export import ExportOptions, export_weights
from coterie.train.baselines import BaselineBits, measure_baselines
from coterie.train.card import CardFacts, write_card
from coterie.train.checkpoint import Point, RunState
from coterie.train.config import Recipe, model_config
from coterie.train.data import Corpus
from coterie.train.evaluate import RegisterResult, evaluate
from coterie.train.plot import plot_history
from coterie.train.tokenizer import BOS, EOS, PAD, write_tokenizer
from coterie.train.trainer import Trainer

Say = Callable[[str], None]
MEASURED_STEPS = 10
EVALUATION_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a run keeps its things."""

    out: Path

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint"

    @property
    def model(self) -> Path:
        return self.out / "model"

    @property
    def plot(self) -> Path:
        return self.out / "loss.png"


def train(trainer: Trainer, paths: Paths, minutes: float | None, on_step: Callable[[Point, RunState], None]) -> None:
    """Run to the end of the plan, saving now and then; an interrupt saves before it is passed on.

    With `minutes`, a fresh run measures its first steps and shortens or lengthens its plan to take about that long; the
    plan is kept in the checkpoint, so that a continuation follows it.
    """
    state = trainer.state
    saved = monotonic()
    try:
        while not trainer.finished:
            point = trainer.step()
            if minutes is not None and state.step == MEASURED_STEPS:
                state.total_steps = planned_steps(state, trainer.recipe.schedule.tokens_per_step, minutes)
            on_step(point, state)
            if monotonic() - saved > trainer.recipe.machine.checkpoint_minutes * 60:
                save_progress(trainer, paths)
                saved = monotonic()
    except KeyboardInterrupt:
        if state.history and state.history[-1].step == state.step - 1:
            save_progress(trainer, paths)
        raise
    save_progress(trainer, paths)


def planned_steps(state: RunState, tokens_per_step: int, minutes: float) -> int:
    """Steps of a run of `minutes` in all, at the median speed of the last half of the steps so far."""
    speeds = sorted(point.tokens_per_second for point in state.history[len(state.history) // 2 :])
    left = max(0.0, minutes * 60 - state.seconds)
    return max(state.step + 1, state.step + int(left * speeds[len(speeds) // 2] / tokens_per_step))


def save_progress(trainer: Trainer, paths: Paths) -> None:
    """Write the checkpoint and the loss plot."""
    trainer.save(paths.checkpoint)
    plot_history(trainer.state.history, trainer.recipe.schedule.tokens_per_step, paths.plot)


def finish(trainer: Trainer, corpus: Corpus, paths: Paths, command: str, say: Say) -> list[RegisterResult]:
    """Evaluate on the held-out text, measure the baselines and export the model folder with its card."""
    recipe = trainer.recipe
    window = min(EVALUATION_WINDOW, recipe.model.max_positions)
    results = evaluate(trainer.spec, trainer.weights, corpus.registers, window, say)
    baselines: dict[str, BaselineBits] = {}
    for register in corpus.registers:
        say(f"baselines of {register.name}")
        baselines[register.name] = measure_baselines(
            corpus.text(register.name, "train"),
            corpus.text(register.name, "held"),
            register.train,
            register.held,
            recipe.model.vocab_size,
        )
    figures = {result.name: asdict(result) | {"baselines": asdict(baselines[result.name])} for result in results}
    (paths.out / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    say("exporting")
    export(trainer, corpus, paths.model)
    facts = CardFacts(trainer.spec, trainer.state, results, baselines, window, command, machine_name(recipe))
    (paths.model / "README.md").write_text(write_card(recipe, corpus, facts), "utf-8")
    if paths.plot.is_file():
        shutil.copy(paths.plot, paths.model / "loss.png")
    return results


def export(trainer: Trainer, corpus: Corpus, folder: Path) -> None:
    """Write config, weights (bfloat16; routers and biases float32), tokenizer and generation defaults."""
    shape = trainer.recipe.model
    options = ExportOptions(dtype="bfloat16", overwrite=True)
    export_weights(trainer.weights, trainer.spec, trainer.kernels, folder, options)
    config = model_config(shape, bos=BOS, eos=EOS, pad=PAD)
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    generation: dict[str, Any] = {**special, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    write_tokenizer(corpus.tokenizer, folder, shape.max_positions)


def machine_name(recipe: Recipe) -> str:
    """Threads and processor as the card names them."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{recipe.machine.threads} threads of a CPU ({model})"
