"""Synthetic checkpoints: released shapes, loadable by us and by transformers, complete or written again."""

from __future__ import annotations

import json

import pytest
from make_checkpoint import SHAPES, Cut, make_checkpoint, make_config

from coterie import LLM, SamplingParams
from coterie.spec.model import ModelSpec, MoESpec


def test_cuts_of_released_shapes() -> None:
    lite = ModelSpec.from_hf(make_config("v2-lite", Cut(layers=8)))
    assert len(lite.layers) == 8
    assert sum(isinstance(layer.ffn, MoESpec) for layer in lite.layers) == 7
    assert lite.num_parameters == pytest.approx(4.59e9, rel=0.01)
    assert ModelSpec.from_hf(make_config("v2-lite", Cut())).num_parameters == pytest.approx(15.7e9, rel=0.01)
    v3 = ModelSpec.from_hf(make_config("v3", Cut(layers=4, experts=32)))
    routed = dict(v3.moe_layers())
    assert {moe.num_experts for moe in routed.values()} == {32}
    assert (len(v3.layers), v3.hidden_size, v3.quantization, v3.mtp_layers) == (4, 7168, None, ())
    qwen = ModelSpec.from_hf(make_config("qwen3-30b-a3b", Cut(layers=6)))
    assert (len(qwen.layers), len(list(qwen.moe_layers()))) == (6, 6)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name.startswith("tiny")])
def test_ours_and_transformers_agree_on_a_checkpoint(shape, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = make_checkpoint(shape, tmp_path / shape, Cut())
    llm = LLM(folder, dtype="float32")
    prompt = llm.tokenizer.encode("the other hand")
    assert len(prompt) < len("the other hand")  # merges apply
    ours = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0].outputs[0]
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = peer(torch.tensor([[*prompt, *ours.token_ids]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(ours.token_ids)


def test_a_complete_folder_is_kept_and_another_is_written_again(tmp_path):
    folder = make_checkpoint("tiny-qwen3", tmp_path / "model", Cut())
    shard = next(folder.glob("*.safetensors"))
    before = shard.read_bytes()
    shard.write_bytes(b"kept")
    make_checkpoint("tiny-qwen3", folder, Cut())
    assert shard.read_bytes() == b"kept"
    (folder / "config.json").unlink()
    make_checkpoint("tiny-qwen3", folder, Cut())
    assert shard.read_bytes() == before
    make_checkpoint("tiny-qwen3", folder, Cut(layers=1))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1


def test_gguf_of_a_checkpoint_has_every_tensor_once(tmp_path):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("torch")
    from make_gguf import make_gguf

    folder = make_checkpoint("tiny-v2", tmp_path / "model", Cut())
    path = make_gguf(folder, tmp_path / "model.gguf", "bf16", 1)
    reader = gguf.GGUFReader(path)
    spec = ModelSpec.from_hf(folder)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == spec.num_parameters
    assert len({tensor.name for tensor in reader.tensors}) == len(reader.tensors)
    assert int(reader.get_field("deepseek2.attention.q_lora_rank").contents()) == 0
