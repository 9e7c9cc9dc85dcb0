"""Bug reports A1, A2, B1, B2, B3 and B4 replayed from files to logits: checkpoints on disk, the whole engine, native.

The loader's own tests look at every value and message with a recording backend; here the question is what a user gets.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_folder, write_index

from coterie import LLM, SamplingParams
from coterie.model.loader import LoadError
from coterie.model.names import weight_layout
from coterie.spec import ModelSpec
from coterie.spec.errors import CoterieError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
Tensors = dict[str, torch.Tensor]

V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 12, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "float32", "num_nextn_predict_layers": 0,
}  # fmt: skip


def random_tensors(config: dict[str, Any], *, mtp: bool = True, seed: int = 0) -> Tensors:
    """Every tensor of the model, N(0, 1 / sqrt(columns)); norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, entry in weight_layout(ModelSpec.from_hf(config), mtp=mtp).tensors.items():
        values = torch.randn(entry.shape, generator=generator)
        tensors[name] = values / entry.shape[-1] ** 0.5 if len(entry.shape) == 2 else 1 + 0.1 * values
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    write_folder(folder, tensors, shards)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(folder: Path, **options: Any) -> np.ndarray:
    with LLM(folder, **{"dtype": "float32", "threads": 1, "page_size": 16, "max_model_len": 64} | options) as llm:
        rows = llm.logits(TOKENS)
        (output,) = llm.generate(TOKENS, GREEDY)
        assert output.outputs[0].token_ids[0] == int(rows[-1].argmax())
        return rows


# A1: a dense MLA layer in float64, from the papers' formulas

A1 = V3 | {
    "model_type": "deepseek_v2", "num_hidden_layers": 1, "scoring_func": "softmax", "topk_method": "greedy",
    "q_lora_rank": None,
}  # fmt: skip


def yarn_angles(scaling: dict[str, Any], dim: int, theta: float) -> tuple[np.ndarray, float, float]:
    """(radians per position of each pair, factor of cos and sin, factor of the softmax scale)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def m(s: float) -> float:
        return 0.1 * s * math.log(factor) + 1 if factor > 1 else 1.0

    def place(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(place(scaling["beta_fast"])), 0), min(math.ceil(place(scaling["beta_slow"])), dim - 1)
    pairs = np.arange(dim // 2)
    ramp = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)
    plain = theta ** (-2.0 * pairs / dim)
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    rotary = m(mscale) / m(all_dim) if mscale and all_dim else m(1)
    return plain / factor * ramp + plain * (1 - ramp), rotary, m(all_dim) ** 2 if all_dim else 1.0


def oracle(tensors: Tensors, scaling: dict[str, Any]) -> np.ndarray:
    """Logits of `A1` with expanded keys and values, float64 throughout."""
    w = {name: value.double().numpy() for name, value in tensors.items()}
    layer = "model.layers.0."
    heads, nope, rope, value, rank = 2, 8, 8, 8, 16
    angles, rotary, softmax = yarn_angles(scaling, rope, 10000.0)
    turns = rotary * np.exp(1j * np.arange(len(TOKENS))[:, None] * angles)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (turns if x.ndim == 2 else turns[:, None])
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = w["model.embed_tokens.weight"][TOKENS]
    h = norm(x, f"{layer}input_layernorm.weight")
    q = (h @ w[f"{layer}self_attn.q_proj.weight"].T).reshape(-1, heads, nope + rope)
    kv = h @ w[f"{layer}self_attn.kv_a_proj_with_mqa.weight"].T
    expanded = norm(kv[:, :rank], f"{layer}self_attn.kv_a_layernorm.weight") @ w[f"{layer}self_attn.kv_b_proj.weight"].T
    k_nope, v = np.split(expanded.reshape(-1, heads, nope + value), [nope], -1)
    scores = np.einsum("tnd,snd->nts", q[..., :nope], k_nope)
    scores += np.einsum("tnd,sd->nts", rotate(q[..., nope:]), rotate(kv[:, rank:]))
    scores *= (nope + rope) ** -0.5 * softmax
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    x = x + np.einsum("nts,snd->tnd", shares, v).reshape(len(x), -1) @ w[f"{layer}self_attn.o_proj.weight"].T
    h = norm(x, f"{layer}post_attention_layernorm.weight")
    gate = h @ w[f"{layer}mlp.gate_proj.weight"].T
    gated = gate / (1 + np.exp(-gate)) * (h @ w[f"{layer}mlp.up_proj.weight"].T)
    return norm(x + gated @ w[f"{layer}mlp.down_proj.weight"].T, "model.norm.weight") @ w["lm_head.weight"].T


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize("changes", [
    {"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 0.707}, {"mscale": 0.707, "mscale_all_dim": 0}, {},
    {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale_all_dim": 0.707},
    {"mscale": 0.707, "mscale_all_dim": 0.707, "factor": 1}, {"mscale": 0.707, "mscale_all_dim": None, "factor": 4},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a1_yarn_in_mla_against_float64(tmp_path: Path, changes: dict[str, Any], family: str) -> None:
    scaling = YARN | changes
    own = {} if family == "deepseek_v2" else {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    config = A1 | own | {"model_type": family, "rope_scaling": scaling}
    tensors = random_tensors(config)
    for name in ("q_proj", "kv_a_proj_with_mqa"):  # sharp attention, so that its scale matters
        tensors[f"model.layers.0.self_attn.{name}.weight"] *= 3
    folder = write(tmp_path, config, tensors)
    expected = oracle(tensors, scaling)
    for context in (38, 64, 512):  # not a function of the context that was asked for
        np.testing.assert_allclose(logits(folder, max_model_len=context), expected, atol=2e-4, rtol=0)
    softmax = yarn_angles(scaling, 8, 10000.0)[2]
    if softmax > 1:
        wrong = oracle(tensors, scaling | {"mscale": None, "mscale_all_dim": None})
        assert np.abs(wrong - expected).max() > 1e-2, "a missing correction must show"


# A2


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a2_with_and_without_the_low_rank_query(tmp_path: Path, backend: Any) -> None:
    low, single = V3 | {"q_lora_rank": 32}, V3 | {"q_lora_rank": None}
    both = {name: config for name, config in (("low", low), ("single", single))}
    tensors = {name: random_tensors(config) for name, config in both.items()}
    for layer in range(3):  # the same projection, once as a product of two and once as one matrix
        a = f"model.layers.{layer}.self_attn."
        q_a, q_b = torch.eye(32), tensors["low"][f"{a}q_b_proj.weight"]
        tensors["low"] |= {f"{a}q_a_proj.weight": q_a, f"{a}q_a_layernorm.weight": torch.ones(32)}
        tensors["single"] |= {name: value for name, value in tensors["low"].items() if name in tensors["single"]}
        tensors["single"][f"{a}q_proj.weight"] = q_b.clone()
        tensors["low"][f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(32)
        tensors["single"][f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(32)
    rows = {name: logits(write(tmp_path / name, both[name], tensors[name]), backend=backend) for name in both}
    np.testing.assert_allclose(rows["low"], rows["single"], atol=2e-4)
    with pytest.raises(LoadError, match="both q_proj and q_a_proj"):
        LLM(write(tmp_path / "both", low, tensors["single"] | tensors["low"]), threads=1)


# B1


def test_b1_the_block_past_the_last_layer_is_never_a_decoder_layer(tmp_path: Path) -> None:
    on = V3 | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    tensors = random_tensors(on)
    assert {name.split(".")[2] for name in tensors if name.startswith("model.layers.")} == set("01234")
    bare = {name: value for name, value in tensors.items() if not name.startswith("model.layers.4.")}
    off = on | {"num_nextn_predict_layers": 0}
    plain = logits(write(tmp_path / "plain", off, bare))
    for name, config, said in (("on", on, None), ("off", off, "declares no such MTP block")):
        folder = write(tmp_path / name, config, tensors)
        np.testing.assert_array_equal(logits(folder), plain)
        with LLM(folder, threads=1) as llm:
            lines = " ".join(llm.load_lines)
        assert said is None or (said in lines and f"skipped {len(tensors) - len(bare)} tensors" in lines)
    np.testing.assert_array_equal(logits(write(tmp_path / "lost", on, bare)), plain)
    short = V3 | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    with pytest.raises(LoadError, match=r"model\.layers\.3\."):
        LLM(write(tmp_path / "short", short, bare), threads=1)


# B2


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("sizes", [
    {"hidden_size": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "intermediate_size": 200,
     "moe_intermediate_size": 200},
    {"hidden_size": 130, "kv_lora_rank": 30, "intermediate_size": 129, "moe_intermediate_size": 129},
    {"hidden_size": 128, "kv_lora_rank": 130, "intermediate_size": 1, "moe_intermediate_size": 1, "q_lora_rank": 200},
], ids=["576x256", "129x130", "1x128"])  # fmt: skip
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_b2_fp8_blocks_of_odd_shapes(tmp_path: Path, sizes: dict[str, int], scale_name: str, backend: Any) -> None:
    """An FP8 checkpoint gives the logits of the float32 checkpoint of its dequantised weights, bit for bit."""
    config = V3 | sizes
    generator = torch.Generator().manual_seed(1)
    stored, plain = {}, {}
    for name, value in random_tensors(config).items():
        if value.ndim != 2 or name.startswith(("model.embed", "lm_head")) or name.endswith("mlp.gate.weight"):
            stored[name] = plain[name] = value
            continue
        codes = (value * 50).to(torch.float8_e4m3fn)
        table = [-(-size // 128) for size in value.shape]
        scale = (torch.rand(table, generator=generator) + 0.5) / 50
        stored[name], stored[name.replace("weight", scale_name)] = codes, scale
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        plain[name] = codes.float() * wide[: value.shape[0], : value.shape[1]]
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    quantised = write(tmp_path / "fp8", config | {"quantization_config": fp8}, stored)
    expected = logits(write(tmp_path / "plain", config, plain), backend=backend)
    np.testing.assert_array_equal(logits(quantised, backend=backend), expected)
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0.1

    name = next(name for name in stored if name.endswith(f"kv_a_proj_with_mqa.{scale_name}"))
    stored[name] = torch.cat([stored[name], stored[name][:1]])
    with pytest.raises(LoadError, match=r"kv_a_proj_with_mqa.*128x128 needs"):
        LLM(write(tmp_path / "wrong", config | {"quantization_config": fp8}, stored), threads=1)


# B3

SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(("case", "says"), [
    ("deleted", [SECOND, "missing", "interrupted download"]), ("truncated", [SECOND, "interrupted download"]),
    ("stale index", [SECOND, "lacks 'lm_head.weight'"]),
])  # fmt: skip
def test_b3_a_folder_that_is_not_whole_is_refused_by_file(tmp_path: Path, case: str, says: list[str]) -> None:
    tensors = random_tensors(V3)
    weight_map = write_folder(tmp_path, tensors, 3)
    (tmp_path / "config.json").write_text(json.dumps(V3))
    if case == "deleted":
        (tmp_path / SECOND).unlink()
    elif case == "truncated":
        (tmp_path / SECOND).write_bytes((tmp_path / SECOND).read_bytes()[:-7])
    else:
        write_index(tmp_path, {**weight_map, "lm_head.weight": SECOND})
    with pytest.raises(CoterieError) as caught:
        LLM(tmp_path, threads=1)
    assert all(word in str(caught.value) for word in says), str(caught.value)


def test_b3_stray_and_overlaid_files_follow_the_index(tmp_path: Path) -> None:
    tensors = random_tensors(V3)
    weight_map = write_folder(tmp_path, tensors, 3)
    (tmp_path / "config.json").write_text(json.dumps(V3))
    plain = logits(tmp_path)
    save_file({name: value + 1 for name, value in tensors.items()}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(logits(tmp_path), plain)
    with LLM(tmp_path, threads=1) as llm:
        assert any("model.safetensors" in line and "ignored" in line for line in llm.load_lines)
    newer = tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}
    save_file({"model.norm.weight": newer["model.norm.weight"]}, tmp_path / "newer.safetensors")
    write_index(tmp_path, {**weight_map, "model.norm.weight": "newer.safetensors"})
    overlaid = logits(tmp_path)
    np.testing.assert_array_equal(overlaid, logits(write(tmp_path / "one", V3, newer)))
    assert np.abs(overlaid - plain).max() > 0.1


# B4


@pytest.mark.parametrize("head", ["absent", "empty", "equal", "different"])
@pytest.mark.parametrize("tie", [True, False, None])
@pytest.mark.parametrize("place", ["root", "nested"])
def test_b4_a_tied_head_by_the_table(tmp_path: Path, place: str, tie: bool | None, head: str) -> None:
    """config says × file says -> which head makes the logits, and what is refused or told."""
    config = V3 | ({} if tie is None else {"tie_word_embeddings": tie})
    config = config if place == "root" else {"model_type": "kimi_k25", "text_config": config}
    tensors = random_tensors(V3)
    embed, other = tensors["model.embed_tokens.weight"], tensors.pop("lm_head.weight")
    heads = {"equal": embed.clone(), "empty": torch.empty(0, 32), "different": other}
    with_head = tensors | ({"lm_head.weight": heads[head]} if head in heads else {})
    folder = write(tmp_path / "case", config, with_head)
    if not tie and head in ("absent", "empty"):
        with pytest.raises(LoadError, match=f"{head}.*set tie_word_embeddings to true"):
            LLM(folder, threads=1)
        return
    used = embed.clone() if tie else heads[head]
    plain = write(tmp_path / "plain", V3, tensors | {"lm_head.weight": used})
    np.testing.assert_array_equal(logits(folder), logits(plain))
    with LLM(folder, threads=1) as llm:
        told = " ".join(llm.load_lines)
    assert ("differs" in told) == (bool(tie) and head == "different")
    assert load_file(folder / "model.safetensors").keys() == with_head.keys()
