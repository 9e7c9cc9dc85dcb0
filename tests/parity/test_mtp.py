"""MTP blocks against transformers' MtpModel: draft logits of each depth, from a checkpoint in the released layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from entries import MATRIX_CASES, OWN_CASES, Case
from oracle import Oracle, prompt, randomise
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.loader import LoadOptions, load_weights
from coterie.model.mtp import MTPBlock
from coterie.model.overlap import drive
from coterie.model.transformer import Runtime, Transformer
from coterie.spec import ModelSpec

WANTED = {"ds3-mtp": 1, "v3-rope-half-split": 2, "glm4-moe-groups-three-quarters": 2}
"""Cases by the number of prediction layers that are added to them."""
CASES = [case for case in MATRIX_CASES + OWN_CASES if case.entry.id in WANTED]


@dataclass(frozen=True)
class Checkpoint:
    """A model with its MTP layers stored as layers `num_hidden_layers` and up of the same file."""

    case: Case
    oracle: Oracle
    mtp: MtpModel
    folder: Path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.entry.id)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.set_num_threads(1)
    case, folder = request.param, tmp_path_factory.mktemp("mtp")
    depth = WANTED[case.entry.id]
    oracle = Oracle(replace(case.entry, config={**case.entry.config, "num_mtp_layers": depth}), folder)
    mtp = MtpModel(oracle.model, depth).eval().float()
    tensors = load_file(folder / "model.safetensors")
    for index, layer in enumerate(mtp.layers):
        randomise(layer, replace(case.entry, seed=index + 5))
        name = f"model.layers.{oracle.model.config.num_hidden_layers + index}"
        tensors.update(released_names(layer.state_dict(), name))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    changes = {"num_nextn_predict_layers": depth, "num_mtp_layers": depth}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return Checkpoint(case, oracle, mtp, folder)


def released_names(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """transformers' in-memory names and fused experts -> DeepSeek-V3's."""
    out = {}
    for name, value in state.items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                out[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(value):
                out[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = down.clone()
        else:
            out[f"{prefix}.{name}"] = value.clone()
    return out


@pytest.mark.parametrize("make", [NativeKernels, ReferenceKernels], ids=["native", "reference"])
@pytest.mark.parametrize("length", [2, 37, 129])
def test_draft_logits(checkpoint: Checkpoint, make: type, length: int) -> None:
    oracle, mtp = checkpoint.oracle, checkpoint.mtp
    depth = WANTED[checkpoint.case.entry.id]
    tokens = prompt(length + depth, seed=length)
    spec, kernels = ModelSpec.from_hf(checkpoint.folder), make()
    loaded = load_weights(checkpoint.folder, spec, kernels, LoadOptions(dtype="float32"))
    assert loaded.report.mtp_present
    model = Transformer(spec, loaded.weights, Runtime.local(kernels))

    batch = kernels.prepare(ForwardBatch.packed(np.array(tokens[:length]), np.array([length])))
    hidden = drive(model.stages(batch))
    with torch.no_grad():
        states = oracle.model.model(torch.tensor([tokens[:length]]), use_cache=False).last_hidden_state
    for index in range(depth):
        later = tokens[index + 1 : index + 1 + length]
        after = kernels.prepare(ForwardBatch.packed(np.array(later), np.array([length])))
        hidden = drive(MTPBlock(model, loaded.weights, index).stages(hidden, after.token_ids, batch))
        ours = kernels.to_host(model.logits(hidden))
        with torch.no_grad():
            positions = torch.arange(index + 1, index + 1 + length)[None]
            states = mtp.forward_layer(index, states, positions, None, input_ids=torch.tensor([later]))
            theirs = mtp._project_to_logits(states)[0].numpy()
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(ours, theirs, atol=checkpoint.case.entry.tolerance, rtol=0)
