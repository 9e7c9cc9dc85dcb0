"""The MTP block against transformers' MtpModel: draft logits of depth 1 from one checkpoint in the released layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from entries import MATRIX_CASES
from oracle import Oracle, prompt, randomise
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.loader import load_weights
from coterie.model.mtp import MTPBlock
from coterie.model.overlap import drive
from coterie.model.transformer import Runtime, Transformer
from coterie.spec import ModelSpec

CASE = next(case for case in MATRIX_CASES if case.entry.id == "ds3-mtp")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, MtpModel, Path]:
    """The matrix entry with its MTP layer written as layer `num_hidden_layers` of the same file."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mtp")
    oracle = Oracle(CASE.entry, folder)
    mtp = MtpModel(oracle.model, 1).eval().float()
    randomise(mtp.layers[0], CASE.entry)
    layers = oracle.model.config.num_hidden_layers
    tensors = load_file(folder / "model.safetensors")
    tensors.update(released_names(mtp.layers[0].state_dict(), f"model.layers.{layers}"))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1, "num_mtp_layers": 1}))
    return oracle, mtp, folder


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
def test_draft_logits(checkpoint: tuple[Oracle, MtpModel, Path], make: type, length: int) -> None:
    oracle, mtp, folder = checkpoint
    tokens = prompt(length + 1, seed=length)
    spec, kernels = ModelSpec.from_hf(folder), make()
    loaded = load_weights(folder, spec, kernels, dtype="float32", load_format="auto")
    assert loaded.report.mtp_present
    model = Transformer(spec, loaded.weights, Runtime.local(kernels))
    block = MTPBlock(model, loaded.weights, 0)

    batch = kernels.prepare(ForwardBatch.packed(np.array(tokens[:-1]), np.array([length])))
    after = kernels.prepare(ForwardBatch.packed(np.array(tokens[1:]), np.array([length])))
    hidden = drive(model.stages(batch))
    ours = kernels.to_host(model.logits(drive(block.stages(hidden, after.token_ids, batch))))

    with torch.no_grad():
        states = oracle.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        positions = torch.arange(1, length + 1)[None]
        draft = mtp.forward_layer(0, states, positions, None, input_ids=torch.tensor([tokens[1:]]))
        theirs = mtp._project_to_logits(draft)[0].numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=CASE.entry.tolerance, rtol=0)
