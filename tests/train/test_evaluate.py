"""Evaluation: every token scored once, bits per byte of a known model, counts that add up; the optimiser's matrices."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.train.tiny import write_recipe

from coterie.cli.train import train as train_command
from coterie.train.config import load_recipe
from coterie.train.data import prepare
from coterie.train.evaluate import evaluate, windows_of
from coterie.train.optimizer import is_matrix, orthogonalise
from coterie.train.tokenizer import BOS
from coterie.train.trainer import Trainer

torch.set_num_threads(1)


@pytest.mark.parametrize("count", [1, 5, 16, 17, 40, 41, 64])
def test_windows_score_each_token_once_in_order(count: int) -> None:
    tokens = np.arange(100, 100 + count, dtype=np.uint16)
    rows, scored = windows_of(tokens, 16)
    assert (rows[:, 0] == BOS).all()
    assert rows[:, 1:][scored].tolist() == tokens.tolist()
    assert all(np.flatnonzero(row)[0] >= 7 for row in scored[1:])


def test_a_model_without_opinion_pays_log_vocabulary(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path))
    corpus = prepare(recipe, tmp_path / "data", tmp_path)
    trainer = Trainer(recipe, corpus)
    trainer.weights["norm"].data.zero_()
    for result, register in zip(
        evaluate(trainer.spec, trainer.weights, corpus.registers, 32), corpus.registers, strict=True
    ):
        assert result.nats_per_token == pytest.approx(math.log(320), rel=1e-5)
        assert result.bits_per_byte == pytest.approx(
            math.log2(320) * len(register.held) / register.held_bytes, rel=1e-5
        )
        rows, _ = windows_of(register.held, 32)
        assert [sum(layer) for layer in result.expert_counts] == [2 * rows[:, 1:].size] * 3


def test_newton_schulz_makes_singular_values_near_one() -> None:
    matrices = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(0))
    for x in (matrices, matrices.transpose(1, 2)):
        values = torch.linalg.svdvals(orthogonalise(x).float())
        assert values.min() > 0.5
        assert values.max() < 1.4
        assert orthogonalise(x).shape == x.shape


def test_muon_takes_matrices_only() -> None:
    kept = ["layers.1.ffn.gate_up", "layers.1.ffn.down", "layers.0.attention.w_uk", "mtp.0.e_proj"]
    assert all(map(is_matrix, kept))
    assert not any(map(is_matrix, ["embed", "head", "layers.1.ffn.gate", "norm", "layers.0.attention.kv_norm"]))


def test_the_command_makes_a_model_folder_and_resumes(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    out = tmp_path / "out"
    runner = CliRunner()
    done = runner.invoke(train_command, [recipe, "--out", str(out), "--tokens", "1024"])
    assert done.exit_code == 0, done.output
    names = {file.name for file in (out / "model").iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "loss.png",
    }
    card = (out / "model" / "README.md").read_text()
    figures = json.loads((out / "evaluation.json").read_text())
    for name in ("verse", "code"):
        assert f"| {name} | **{figures[name]['bits_per_byte']:.3f}** | {figures[name]['baselines']['xz']:.3f} " in card
    again = runner.invoke(train_command, [recipe, "--out", str(out), "--tokens", "1024"])
    assert again.exit_code == 2
    assert "--resume" in again.output
    resumed = runner.invoke(train_command, [recipe, "--out", str(out), "--resume"])
    assert resumed.exit_code == 0, resumed.output


def test_prepare_lists_the_registers(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    done = CliRunner().invoke(train_command, ["prepare", recipe, "--data", str(tmp_path / "text")])
    assert done.exit_code == 0, done.output
    assert "verse" in done.output
    assert (tmp_path / "text" / "manifest.json").is_file()
