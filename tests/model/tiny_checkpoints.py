"""Helpers for loader tests: a recording backend on plain numpy, a tiny DeepSeek-V3-like spec, checkpoint writers.

`hf_tensors` spells out the released names and shapes by hand, so that it checks the name table and does not repeat it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec
from coterie.spec.weights import MatrixSpec

HIDDEN, VOCAB, HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 24, 50, 2, 6, 4, 5, 8, 10
EXPERTS, INNER, SHARED, DENSE = 4, 7, 9, 13


@dataclass
class FakeBank:
    values: np.ndarray
    kind: str


@dataclass
class FakeKernels:
    """Weights only. Rounds like a real backend, copies nothing it should not, and counts allocations and fills."""

    name: str = "fake"
    allocated: int = 0
    fills: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def allocate(self, count: int, *matrices: MatrixSpec) -> tuple[FakeBank, ...]:
        self.allocated += len(matrices)

        def make(matrix: MatrixSpec) -> FakeBank:
            stored = np.float32 if matrix.format.kind == "f32" else np.uint16
            return FakeBank(np.zeros((count, matrix.rows, matrix.cols), stored), matrix.format.kind)

        return tuple(make(matrix) for matrix in matrices)

    def fill(self, bank: FakeBank, index: int, row: int, values: np.ndarray) -> None:
        assert values.dtype == np.float32 and values.flags.c_contiguous and values.flags.aligned
        assert values.shape[1] == bank.values.shape[2] and row + len(values) <= bank.values.shape[1]
        self.fills.append((index, row, values.shape))
        target = bank.values[index, row : row + len(values)]
        target[...] = values if bank.kind == "f32" else to_bits(values)

    def fill_bf16(self, bank: FakeBank, index: int, row: int, bits: np.ndarray) -> None:
        assert bits.dtype == np.uint16
        self.fill(bank, index, row, from_bits(bits))

    def measure(self, bank: FakeBank, index: int, row: int, values: np.ndarray) -> tuple[float, float]:
        held = self.read(bank, index)[row : row + len(values)].astype(np.float64)
        return float(((held - values) ** 2).sum()), float((values.astype(np.float64) ** 2).sum())

    def read(self, bank: FakeBank, index: int) -> np.ndarray:
        values = bank.values[index]
        return values.copy() if bank.kind == "f32" else from_bits(values)

    def vector(self, values: np.ndarray) -> np.ndarray:
        assert values.dtype == np.float32 and values.ndim == 1
        return values

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array


def to_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def from_bits(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()


def tiny_spec(**changes: Any) -> ModelSpec:
    """MLA, one dense and one MoE layer, one MTP block. `changes`: `q_lora_rank` and ModelSpec fields."""
    attention = AttentionSpec(
        kind="mla",
        num_heads=HEADS,
        num_kv_heads=HEADS,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=VALUE,
        softmax_scale=0.3,
        rope=RopeSpec(ROPE, 10000.0, True),
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        q_lora_rank=changes.pop("q_lora_rank", Q_RANK),
        kv_lora_rank=RANK,
    )
    moe = MoESpec(EXPERTS, 2, INNER, scoring="sigmoid", correction_bias=True, shared_intermediate_size=SHARED)
    sparse = LayerSpec(attention, moe)
    fields: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "layers": (LayerSpec(attention, DenseSpec(DENSE)), sparse),
        "norm_eps": 1e-6,
        "max_positions": 64,
        "mtp_layers": (sparse,),
    }
    return ModelSpec(**{**fields, **changes})


def _decoder(prefix: str, dense: bool, q_lora_rank: int | None) -> dict[str, tuple[int, ...]]:
    a = f"{prefix}self_attn."
    shapes: dict[str, tuple[int, ...]] = {}
    if q_lora_rank is None:
        shapes[f"{a}q_proj.weight"] = (HEADS * (NOPE + ROPE), HIDDEN)
    else:
        shapes[f"{a}q_a_proj.weight"] = (q_lora_rank, HIDDEN)
        shapes[f"{a}q_a_layernorm.weight"] = (q_lora_rank,)
        shapes[f"{a}q_b_proj.weight"] = (HEADS * (NOPE + ROPE), q_lora_rank)
    shapes[f"{a}kv_a_proj_with_mqa.weight"] = (RANK + ROPE, HIDDEN)
    shapes[f"{a}kv_a_layernorm.weight"] = (RANK,)
    shapes[f"{a}kv_b_proj.weight"] = (HEADS * (NOPE + VALUE), RANK)
    shapes[f"{a}o_proj.weight"] = (HIDDEN, HEADS * VALUE)
    mlps = (
        [("", DENSE)] if dense else [*((f"experts.{e}.", INNER) for e in range(EXPERTS)), ("shared_experts.", SHARED)]
    )
    for name, inner in mlps:
        shapes[f"{prefix}mlp.{name}gate_proj.weight"] = (inner, HIDDEN)
        shapes[f"{prefix}mlp.{name}up_proj.weight"] = (inner, HIDDEN)
        shapes[f"{prefix}mlp.{name}down_proj.weight"] = (HIDDEN, inner)
    if not dense:
        shapes[f"{prefix}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
    shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes


def hf_tensors(
    dtype: torch.dtype = torch.float32, *, mtp: bool = True, q_lora_rank: int | None = Q_RANK, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random tensors in the released layout of `tiny_spec`; the correction bias is float32 in any checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(3 if mtp else 2):
        shapes |= _decoder(f"model.layers.{layer}.", layer == 0, q_lora_rank)
    if mtp:
        block = "model.layers.2."
        shapes |= {f"{block}enorm.weight": (HIDDEN,), f"{block}hnorm.weight": (HIDDEN,)}
        shapes |= {f"{block}eh_proj.weight": (HIDDEN, 2 * HIDDEN), f"{block}shared_head.norm.weight": (HIDDEN,)}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if "correction_bias" in name else dtype)
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> dict[str, str]:
    """A checkpoint folder by the official writer; more than one shard gets an index. Returns the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return dict.fromkeys(tensors, "model.safetensors")
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw_file(header: Any, data: bytes = b"") -> bytes:
    """File bytes with any header: a value that is dumped as JSON, or the header's own bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_in_order(path: Path, tensors: dict[str, tuple[str, torch.Tensor]]) -> None:
    """A file with the tensors in exactly this order (the official writer sorts): name -> (dtype name, tensor)."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, tensor) in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    path.write_bytes(raw_file(header, data))
