"""A run from recipe to exported model: it learns, resumes bit for bit, counts exactly, and serves what it trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.train.tiny import write_recipe

from coterie.kernels.batch import ForwardBatch
from coterie.kernels.reference import ReferenceKernels
from coterie.model.loader import load_weights
from coterie.model.overlap import drive
from coterie.model.transformer import Runtime, Transformer
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.train.balance import update_bias, violation
from coterie.train.config import load_recipe
from coterie.train.data import Corpus, prepare
from coterie.train.evaluate import rounded
from coterie.train.model import LanguageModel, routed_layers
from coterie.train.run import Paths, export, planned_steps, train
from coterie.train.trainer import Trainer, rates_at

torch.set_num_threads(1)


def make(folder: Path, **options: object) -> tuple[Trainer, Corpus]:
    recipe = load_recipe(write_recipe(folder, **options))  # type: ignore[arg-type]
    corpus = prepare(recipe, folder / "data", folder)
    return Trainer(recipe, corpus), corpus


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_loss_falls(tmp_path: Path, compute: str) -> None:
    trainer, _ = make(tmp_path, compute=compute)
    while not trainer.finished:
        trainer.step()
    history = trainer.state.history
    assert len(history) == 30
    assert history[0].loss == pytest.approx(np.log(320), rel=0.05)
    assert np.mean([point.loss for point in history[-3:]]) < 0.6 * history[0].loss
    assert np.mean([point.mtp_loss for point in history[-3:]]) < 0.8 * history[0].mtp_loss


def test_resumed_run_is_the_same_run_bit_for_bit(tmp_path: Path) -> None:
    whole, corpus = make(tmp_path, compute="bfloat16")
    for _ in range(6):
        whole.step()
    first = Trainer(whole.recipe, corpus)
    for _ in range(3):
        first.step()
    first.save(tmp_path / "checkpoint")
    second = Trainer(whole.recipe, corpus)
    assert second.resume(tmp_path / "checkpoint")
    assert second.state.step == 3
    for _ in range(3):
        second.step()
    assert [point.loss for point in second.state.history] == [point.loss for point in whole.state.history]
    left, right = whole.tensors(), second.tensors()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert any(key.endswith("correction_bias") and right[key].abs().max() > 0 for key in right)


def test_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    trainer, corpus = make(tmp_path / "a")
    trainer.save(tmp_path / "checkpoint")
    other = load_recipe(write_recipe(tmp_path / "b", tied=False))
    with pytest.raises(CoterieError, match="another recipe"):
        Trainer(other, corpus).resume(tmp_path / "checkpoint")


def test_counts_are_tokens_times_k_per_layer_and_only_of_training(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    trainer.step()
    trainer.step()
    counts = trainer.model.load.read()
    assert counts.shape == (3, 8)
    assert (counts.sum(1) == 2 * 256 * 2).all()
    other = LanguageModel(trainer.spec, rounded(trainer.weights), trainer.kernels)
    other.losses(trainer.batches.batch(0, 32))
    assert (trainer.model.load.read() == counts).all()


def test_bias_moves_by_the_sign_of_exact_counts() -> None:
    bias = torch.zeros(4)
    update_bias(bias, np.array([10, 20, 30, 20]), 0.5)
    assert bias.tolist() == [0.5, 0.0, -0.5, 0.0]
    huge = 2**40
    update_bias(bias, np.array([huge - 1, huge + 1, huge, huge]), 0.25)
    assert bias.tolist() == [0.75, -0.25, -0.5, 0.0]
    assert violation(np.array([[10, 20, 30, 20], [5, 5, 5, 5]])) == pytest.approx(0.5)


def test_bias_selects_but_never_weighs(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    _, key, spec = routed_layers(trainer.spec)[0]
    x, gate = torch.randn(5, 32), trainer.weights[f"{key}.gate"]
    bias = torch.zeros(8)
    bias[6] = 5.0
    routed = trainer.kernels.route(x, gate, bias, spec)
    assert (routed.expert_ids[:, 0] == 6).all()
    scores = torch.sigmoid(x @ gate[0].T).gather(1, routed.expert_ids)
    expected = scores / (scores.sum(1, keepdim=True) + spec.norm_epsilon) * 1.5
    torch.testing.assert_close(routed.expert_weights, expected)


@pytest.mark.parametrize(("tied", "q_lora_rank"), [(True, 0), (False, 12)])
def test_exported_model_gives_the_trainers_logits(tmp_path: Path, tied: bool, q_lora_rank: int) -> None:
    trainer, corpus = make(tmp_path, tied=tied, q_lora_rank=q_lora_rank)
    for _ in range(4):
        trainer.step()
    export(trainer, corpus, tmp_path / "model")
    spec = ModelSpec.from_hf(tmp_path / "model")
    assert spec == trainer.spec
    reference = ReferenceKernels()
    weights = load_weights(tmp_path / "model", spec, reference).weights
    loaded = Transformer(spec, weights, Runtime.local(reference))
    ids = trainer.batches.batch(0, 32)[:, :-1]
    batch = reference.prepare(ForwardBatch.packed(ids.reshape(-1), np.full(len(ids), ids.shape[1])))
    logits = loaded.logits(drive(loaded.stages(batch)))
    ours = LanguageModel(trainer.spec, rounded(trainer.weights), trainer.kernels)
    states, _ = ours.hidden(ids, ids)
    expected = (states @ ours.head.T).detach()
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    bias = f"{routed_layers(spec)[0][1]}.correction_bias"
    assert torch.equal(weights[bias], trainer.weights[bias])


def test_schedule_ends_at_zero_and_never_rises_after_the_plateau(tmp_path: Path) -> None:
    schedule = load_recipe(write_recipe(tmp_path)).schedule
    rates = [rates_at(schedule, step, 100) for step in range(100)]
    assert rates[0].learning == pytest.approx(1 / 3)
    assert rates[10].learning == rates[49].learning == 1.0
    tail = [rate.learning for rate in rates[50:]]
    assert tail == sorted(tail, reverse=True)
    assert rates[-1].learning == pytest.approx(0.02)
    assert rates[0].mtp_weight == 0.3
    assert rates[-1].mtp_weight == pytest.approx(0.1, abs=0.01)
    assert rates[96].bias_speed > 0
    assert rates[98].bias_speed == 0


def test_minutes_plan_the_run_once_and_it_is_kept(tmp_path: Path) -> None:
    trainer, corpus = make(tmp_path)
    paths = Paths(tmp_path / "out")
    trainer.state.total_steps = 12
    planned: list[int] = []
    train(trainer, paths, 1e-4, lambda point, state: planned.append(state.total_steps))
    assert planned[:9] == [12] * 9
    assert planned[9:] == [11] * 2
    assert paths.plot.stat().st_size > 1000
    again = Trainer(trainer.recipe, corpus)
    assert again.resume(paths.checkpoint)
    assert again.finished
    for index in range(len(trainer.state.history)):
        trainer.state.history[index] = trainer.state.history[index].__class__(index, 1, 1, 1, 1, 256.0)
    trainer.state.seconds = 10.0
    assert planned_steps(trainer.state, 256, 1.0) == 11 + 50
