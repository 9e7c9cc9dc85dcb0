"""A GGUF of a synthetic checkpoint, as llama.cpp's own converter would lay it out, for llama-cpp-python.

    python benchmarks/make_gguf.py CHECKPOINT OUT.gguf --type q8_0

The bf16 file is written here with the `gguf` package, tensor by tensor; other types are made from it by llama.cpp's own
quantiser, so that they are what its users get. Two traps of llama.cpp are gone round: it knows V2-Lite (no query rank)
by its 26 or 27 layers, so a cut says that the query's rank is 0; and its converter's check of tokenizers wants a known
one, so the synthetic one is written here as GPT-2's kind. DeepSeek V2 and V3, and Qwen3-MoE. Needs torch to read bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors import safe_open

BF16, F32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
TYPES = {"bf16": None, "q8_0": 7, "q4_0": 2, "q4_k_m": 15}
"""llama.cpp's numbers of file types."""

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the file: values are made when their turn comes, bf16 as their bits."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    data: Callable[[], NDArray[Any]]

    @property
    def numpy_type(self) -> type[np.generic]:
        return np.uint16 if self.type == BF16 else np.float32


class Checkpoint:
    """The safetensors files of a folder by tensor name."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.files = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self.files |= dict.fromkeys(file.keys(), file)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def bits(self, name: str) -> NDArray[np.uint16]:
        import torch

        return self.files[name].get_tensor(name).to(torch.bfloat16).view(torch.uint16).numpy()

    def floats(self, name: str) -> NDArray[np.float32]:
        return self.files[name].get_tensor(name).float().numpy()


def plan(source: Checkpoint) -> Iterator[Planned]:
    """Every tensor of the file, in order."""
    yield matrix(source, "model.embed_tokens.weight", "token_embd.weight")
    for layer in range(source.config["num_hidden_layers"]):
        prefix, out = f"model.layers.{layer}.", f"blk.{layer}."
        for name, short in NAMES.items():
            full = f"{prefix}{name}.weight"
            if full in source.files:
                narrow = len(source.shape(full)) == 2 and name != "mlp.gate"
                yield (matrix if narrow else vector)(source, full, f"{out}{short}.weight")
        bias = f"{prefix}mlp.gate.e_score_correction_bias"
        if bias in source.files:
            yield vector(source, bias, f"{out}exp_probs_b.bias")
        if f"{prefix}self_attn.kv_b_proj.weight" in source.files:
            yield from latent(source, f"{prefix}self_attn.kv_b_proj.weight", out)
        if f"{prefix}mlp.experts.0.gate_proj.weight" in source.files:
            for end, short in EXPERTS.items():
                yield experts(source, f"{prefix}mlp.experts", end, f"{out}{short}.weight")
    yield vector(source, "model.norm.weight", "output_norm.weight")
    yield matrix(source, "lm_head.weight", "output.weight")


def matrix(source: Checkpoint, name: str, out: str) -> Planned:
    return Planned(out, source.shape(name), BF16, lambda: source.bits(name))


def vector(source: Checkpoint, name: str, out: str) -> Planned:
    """What llama.cpp keeps in f32: vectors, and the router's matrix."""
    return Planned(out, source.shape(name), F32, lambda: source.floats(name))


def experts(source: Checkpoint, prefix: str, end: str, out: str) -> Planned:
    count = source.config.get("n_routed_experts") or source.config["num_experts"]
    names = [f"{prefix}.{expert}.{end}.weight" for expert in range(count)]
    return Planned(out, (count, *source.shape(names[0])), BF16, lambda: np.stack([source.bits(name) for name in names]))


def latent(source: Checkpoint, name: str, out: str) -> Iterator[Planned]:
    """kv_b per head: the key part transposed, the value part as it is."""
    config = source.config
    heads, nope, value, rank = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )

    def parts() -> NDArray[np.uint16]:
        return source.bits(name).reshape(heads, nope + value, rank)

    yield Planned(f"{out}attn_k_b.weight", (heads, rank, nope), BF16,
                  lambda: np.ascontiguousarray(parts()[:, :nope].transpose(0, 2, 1)))  # fmt: skip
    yield Planned(f"{out}attn_v_b.weight", (heads, value, rank), BF16, lambda: np.ascontiguousarray(parts()[:, nope:]))


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The keys that llama.cpp's loader asks for."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    else:
        add_deepseek(writer, config)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Tokens by id, merges, and which tokens are special."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {config["bos_token_id"], config["eos_token_id"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if i in special else normal for i in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The latent attention is one key head of the compressed width; the real widths are the `mla` keys."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    sigmoid = config["scoring_func"] == "sigmoid"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    scaling = config["rope_scaling"]
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def write_bf16(folder: Path, out: Path) -> None:
    """The whole model in bf16, one tensor in memory at a time."""
    source = Checkpoint(folder)
    planned = list(plan(source))
    left_over = set(source.files) - used_names(source)
    assert not left_over, f"tensors without a place in the file: {sorted(left_over)[:3]}"
    partial = out.with_name(out.name + ".partial")
    arch = "qwen3moe" if source.config["model_type"] == "qwen3_moe" else "deepseek2"
    writer = gguf.GGUFWriter(str(partial), arch)
    add_config(writer, source.config)
    add_tokenizer(writer, folder, source.config)
    for tensor in planned:
        size = int(np.prod(tensor.shape)) * np.dtype(tensor.numpy_type).itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(tensor.numpy_type), size, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in track(planned, out.name, console=Console(stderr=True)):
        writer.write_tensor_data(np.ascontiguousarray(tensor.data()))
    writer.close()
    partial.rename(out)


def used_names(source: Checkpoint) -> set[str]:
    """Tensors of the checkpoint that `plan` takes, told by their names alone."""
    known = {f"{name}.weight" for name in NAMES} | {"self_attn.kv_b_proj.weight", "mlp.gate.e_score_correction_bias"}
    top = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    inner = {name: name.split(".", 3)[-1] for name in source.files if name.startswith("model.layers.")}
    return top | {name for name, rest in inner.items() if rest in known or rest.startswith("mlp.experts.")}


QUANTISE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(sys.argv[3]), int(sys.argv[4])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def make_gguf(folder: Path, out: Path, kind: str, threads: int, python: str = sys.executable) -> Path:
    """Write `out` unless it is there; other types than bf16 are made from a bf16 file beside it.

    python: of an environment with llama-cpp-python, which quantises.
    """
    if out.is_file():
        return out
    if kind == "bf16":
        write_bf16(folder, out)
        return out
    base = make_gguf(folder, out.with_name(f"{folder.name}-bf16.gguf"), "bf16", threads)
    partial = out.with_name(out.name + ".partial")
    command = [python, "-c", QUANTISE, str(base), str(partial), str(TYPES[kind]), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"llama.cpp's quantiser failed with {done.returncode} on {base.name}: {done.stderr[-500:]}")
    partial.rename(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), default="q8_0")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(make_gguf(arguments.checkpoint, arguments.out, arguments.type, arguments.threads))


if __name__ == "__main__":
    main()
