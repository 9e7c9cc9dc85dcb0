"""A tiny DeepSeek-V3-style config and folders made of it; weights are random (load_format "dummy")."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontends import Bench
from tiny_tokenizers import byte_tokenizer


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """MLA, one dense and two MoE layers, float32; the vocabulary of `byte_tokenizer` and a little padding."""
    return {
        "model_type": "deepseek_v3",
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }


@pytest.fixture
def tiny_folder(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """config.json and a byte tokenizer, no weights."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    return byte_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    yield Bench(folder)
