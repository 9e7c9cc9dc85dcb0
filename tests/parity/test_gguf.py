"""GGUF files of tiny transformers models: the logits are transformers', in float32 and for quantised blocks.

Every supported architecture, both forms of the latent projection, permuted rows, Llama 3's factors as a tensor, tied
heads, stacked experts; block types for the tensors whose rows divide, where the oracle gets the dequantised values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from entries import ALL_CASES, LLAMA3, Case, _other
from gguf import GGMLQuantizationType, quants
from oracle import Oracle, prompt
from safetensors.numpy import load_file

from coterie import LLM
from coterie.model.gguf import open_gguf
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
from gguf_files import gguf_tensors, metadata_of, tame_raw, write_gguf

OPTIONS: dict[str, Any] = {"max_model_len": 256, "page_size": 16, "threads": 1, "kv_cache_tokens": 512}
ARCHITECTURES = {
    "llama-bias-linear-rope": "llama", "mistral-dense": "llama", "qwen2-dense-tied": "qwen2",
    "qwen3-dense": "qwen3", "qwen3-yarn-tied": "qwen3", "qwen3-moe-gguf": "qwen3moe", "mixtral": "llama",
    "mixtral-top-3-of-5": "llama", "ds2-lite": "deepseek2", "v2-groups-max-q-lora": "deepseek2", "ds3": "deepseek2",
    "v3-groups-null-raw-weights": "deepseek2", "v3-odd-sizes": "deepseek2",
}  # fmt: skip
LLAMA31 = _other(
    "llama3-gguf", "Llama", {}, head_dim=16,
    rope_parameters={**LLAMA3, "rope_theta": 5e5, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)  # fmt: skip
QWEN3_MOE = _other(
    "qwen3-moe-gguf", "Qwen3Moe", {}, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, head_dim=16,
    norm_topk_prob=True,
)  # fmt: skip
CASES = [case for case in (*ALL_CASES, QWEN3_MOE) if case.entry.id in ARCHITECTURES]
Get = Callable[[Case], Oracle]


def name_of(case: Case) -> str:
    return case.entry.id


def parts(oracle: Oracle, architecture: str, *, absorbed: bool = True) -> tuple[dict, dict]:
    """(metadata, tensors) of an oracle's folder."""
    config = json.loads((oracle.folder / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for file in oracle.folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return metadata_of(config, architecture), gguf_tensors(tensors, config, architecture, absorbed=absorbed)


def compare(path: Path, oracle: Oracle, tolerance: float) -> None:
    with LLM(path, **OPTIONS) as llm:
        for length in (1, 65):
            token_ids = prompt(length, seed=length)
            np.testing.assert_allclose(llm.logits(token_ids), oracle.logits(token_ids), atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits(case: Case, oracle_of: Get, tmp_path: Path) -> None:
    oracle, architecture = oracle_of(case), ARCHITECTURES[case.entry.id]
    metadata, tensors = parts(oracle, architecture)
    write_gguf(tmp_path / "model.gguf", architecture, metadata, tensors)
    compare(tmp_path / "model.gguf", oracle, case.entry.tolerance)
    config = open_gguf(tmp_path / "model.gguf").config
    ours, theirs = ModelSpec.from_hf(config), ModelSpec.from_hf(oracle.folder)
    assert ours.num_parameters == theirs.num_parameters
    assert [layer.ffn for layer in ours.layers] == [layer.ffn for layer in theirs.layers]


def test_latent_projection_in_one_piece(oracle_of: Get, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.entry.id == "ds3")
    oracle = oracle_of(case)
    metadata, tensors = parts(oracle, "deepseek2", absorbed=False)
    config = json.loads((oracle.folder / "config.json").read_text())
    for key in ("key_length_mla", "value_length_mla"):
        del metadata[f"deepseek2.attention.{key}"]
    metadata["deepseek2.attention.key_length"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    metadata["deepseek2.attention.value_length"] = config["v_head_dim"]
    write_gguf(tmp_path / "old.gguf", "deepseek2", metadata, tensors)
    compare(tmp_path / "old.gguf", oracle, case.entry.tolerance)


def llama3_factors(oracle: Oracle) -> np.ndarray:
    """What divides the frequencies: the model's own against plain ones."""
    config = oracle.model.config
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    return (plain / oracle.model.model.rotary_emb.inv_freq).numpy().astype(np.float32)


def test_llama3_factors_are_recognised(oracle_of: Get, tmp_path: Path) -> None:
    oracle = oracle_of(LLAMA31)
    metadata, tensors = parts(oracle, "llama")
    factors = llama3_factors(oracle)
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    write_gguf(tmp_path / "model.gguf", "llama", metadata, {**tensors, "rope_freqs.weight": factors})
    compare(tmp_path / "model.gguf", oracle, LLAMA31.entry.tolerance)
    assert open_gguf(tmp_path / "model.gguf").config["rope_scaling"]["original_max_position_embeddings"] == 8192
    odd = tmp_path / "odd"
    odd.mkdir()
    write_gguf(odd / "model.gguf", "llama", metadata, {**tensors, "rope_freqs.weight": factors**2})
    with pytest.raises(CoterieError, match=r"factors that are not Llama 3's"):
        open_gguf(odd)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "BF16", "F16"])
@pytest.mark.parametrize("model", ["mixtral", "ds3"])
def test_quantised_blocks(kind: str, model: str, oracle_of: Get, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.entry.id == model)
    oracle, architecture = oracle_of(case), ARCHITECTURES[model]
    metadata, tensors = parts(oracle, architecture)
    types = {name: kind for name, value in tensors.items() if value.ndim > 1 and value.shape[-1] % 32 == 0}
    types = {name: kind for name in types if "ffn_gate_inp" not in name}
    write_gguf(tmp_path / "model.gguf", architecture, metadata, tensors, types)
    stored = {name: dequantised(value, types.get(name)) for name, value in tensors.items()}
    write_gguf(tmp_path / "wide.gguf", architecture, metadata, stored)
    token_ids = prompt(40, seed=1)
    with LLM(tmp_path / "wide.gguf", **OPTIONS) as llm:
        wide = llm.logits(token_ids)
    with LLM(tmp_path / "model.gguf", dtype="float32", **OPTIONS) as llm:
        np.testing.assert_array_equal(llm.logits(token_ids), wide)
    moved = np.abs(wide - oracle.logits(token_ids)).max()
    assert moved > 1e-3, "the types made no difference"


def dequantised(value: np.ndarray, kind: str | None) -> np.ndarray:
    if kind is None:
        return value
    number = GGMLQuantizationType[kind]
    return quants.dequantize(quants.quantize(np.ascontiguousarray(value), number), number)


def test_split_files_and_a_folder(oracle_of: Get, tmp_path: Path) -> None:
    case, oracle = QWEN3_MOE, oracle_of(QWEN3_MOE)
    metadata, tensors = parts(oracle, "qwen3moe")
    names = sorted(tensors)
    for number, part in enumerate((names[:7], names[7:9], names[9:])):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        path = tmp_path / f"big-{number + 1:05d}-of-00003.gguf"
        own = {**metadata, **split} if number == 0 else split
        write_gguf(path, "qwen3moe", own, {name: tensors[name] for name in part})
    compare(tmp_path, oracle, case.entry.tolerance)
    compare(tmp_path / "big-00002-of-00003.gguf", oracle, case.entry.tolerance)
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(CoterieError, match="1 are missing"):
        open_gguf(tmp_path)


MIXTURE = {
    "token_embd": "Q8_0", "attn_output": "IQ4_XS", "output.weight": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q5_K",
    "attn_v": "Q6_K", "ffn_gate": "Q4_K", "ffn_up": "Q6_K", "ffn_down": "Q2_K",
}  # fmt: skip
WIDE = _other("llama-gguf-256", "Llama", {}, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=2)


def test_a_mixture_of_block_types(oracle_of: Get, tmp_path: Path) -> None:
    """As Q4_K_M and the like are: a type for each tensor. Every bank holds what its blocks mean."""
    metadata, tensors = parts(oracle_of(WIDE), "llama")
    rng = np.random.default_rng(3)
    wide = dict(tensors)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, value in tensors.items():
        kind = next((kind for part, kind in MIXTURE.items() if part in name and value.ndim == 2), None)
        if kind is None:
            writer.add_tensor(name, value)
            continue
        number = GGMLQuantizationType[kind]
        raw = tame_raw(kind, len(value), 256 // gguf.GGML_QUANT_SIZES[number][0], rng)
        wide[name] = quants.dequantize(raw, number)
        writer.add_tensor(name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_gguf(tmp_path / "wide.gguf", "llama", metadata, wide)
    token_ids = prompt(30, seed=2)
    with LLM(tmp_path / "wide.gguf", **OPTIONS) as llm:
        expected = llm.logits(token_ids)
    with LLM(tmp_path / "model.gguf", dtype="float32", **OPTIONS) as llm:
        np.testing.assert_array_equal(llm.logits(token_ids), expected)
    with LLM(tmp_path / "model.gguf", **OPTIONS) as llm:
        lines = "\n".join(llm.load_lines)
        close = llm.logits(token_ids)
    for said in (
        "Q8_0 -> int8 g32: exact", "Q4_K -> affine4 g32: exact", "Q5_K -> affine8 g32: exact",
        "Q6_K -> int8 g16: exact", "IQ4_XS -> iq4 g32: exact", "Q4_K -> bf16: rounded", "Q6_K -> bf16: rounded",
        "Q2_K -> bf16: rounded", "Q2_K have no form of their own",
    ):  # fmt: skip
        assert said in lines, (said, lines)
    assert np.linalg.norm(close - expected) < 0.1 * np.linalg.norm(expected)
