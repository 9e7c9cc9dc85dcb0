"""Synthetic checkpoints in the exact shapes of released models, for speed and memory: random weights, no meaning.

    python benchmarks/make_checkpoint.py v2-lite OUT --layers 8
    python benchmarks/make_checkpoint.py v3 OUT --layers 4 --experts 32
    python benchmarks/make_checkpoint.py qwen3-30b-a3b OUT --layers 8

A folder of `config.json` (the released one, cut), bf16 safetensors shards and a tokenizer that other engines accept.
Matrices are normal(0, 0.02), norms 1 + noise, so activations stay finite and routing is spread. Tensor names and shapes
are the package's own table. A complete folder is left alone; an incomplete one is written again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coterie.model.dequant import to_bfloat16
from coterie.model.names import weight_layout
from coterie.model.safetensors_io import NewTensor, write_file
from coterie.spec.model import ModelSpec

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs"
TINY = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1,
        "max_position_embeddings": 4096}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("deepseek-v2-lite.json", {}),
    "v3": ("deepseek-v3.json", {"num_hidden_layers": 4, "n_routed_experts": 32}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b.json", {}),
    "tiny-v2": ("deepseek-v2-lite.json", {**TINY, "rope_scaling": None, "num_hidden_layers": 3, "n_routed_experts": 8,
                                          "num_experts_per_tok": 2}),  # its latent keeps its width: vllm takes no other
    "tiny-qwen3": ("qwen3-30b-a3b.json", {**TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
                                          "num_key_value_heads": 2, "head_dim": 64}),
}  # fmt: skip
STD, NORM_NOISE, BIAS_STD = 0.02, 0.05, 0.1
POOL_VALUES = 1 << 25
SHARD_BYTES = 2_000_000_000
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r")]
"""llama.cpp refuses a tokenizer without merges."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What is taken of a shape; None keeps the shape's own."""

    layers: int | None = None
    experts: int | None = None


def make_config(shape: str, cut: Cut) -> dict[str, Any]:
    """The released config.json with the shape's changes, the cut, no quantisation and no MTP block."""
    name, changes = SHAPES[shape]
    config = {**json.loads((CONFIGS / name).read_text()), **changes}
    experts = "num_experts" if "num_experts" in config else "n_routed_experts"
    config |= {"num_hidden_layers": cut.layers or config["num_hidden_layers"]}
    config |= {experts: cut.experts or config[experts], "torch_dtype": "bfloat16"}
    for key in ("quantization_config", "auto_map", "num_nextn_predict_layers"):
        config.pop(key, None)
    if config["model_type"] == "deepseek_v3":
        config["num_nextn_predict_layers"] = 0
    if "first_k_dense_replace" in config:  # a short cut still has layers that route
        config["first_k_dense_replace"] = min(config["first_k_dense_replace"], max(1, config["num_hidden_layers"] - 3))
    if "max_window_layers" in config:
        config["max_window_layers"] = config["num_hidden_layers"]
    return config


def make_checkpoint(shape: str, folder: Path, cut: Cut, *, seed: int = 0) -> Path:
    """Write the checkpoint unless it is there, complete and of the same config; returns the folder."""
    config = make_config(shape, cut)
    done = folder / "config.json"
    if done.is_file() and json.loads(done.read_text()) == config:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec = ModelSpec.from_hf(config)
    write_tokenizer(folder, config)
    with Progress(TextColumn(folder.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                  TimeRemainingColumn(), console=Console(stderr=True)) as progress:  # fmt: skip
        write_weights(folder, spec, seed, progress)
    done.write_text(json.dumps(config, indent=2) + "\n")  # last: it says that all is there
    return folder


def write_weights(folder: Path, spec: ModelSpec, seed: int, progress: Progress) -> None:
    """All tensors of the spec in shards of about 2 GB, and the index."""
    pool = to_bfloat16(np.random.default_rng(seed).standard_normal(POOL_VALUES, np.float32) * np.float32(STD))
    tensors = [
        new_tensor(name, entry.shape, seed, pool) for name, entry in weight_layout(spec, mtp=False).tensors.items()
    ]
    shards: list[list[NewTensor]] = [[]]
    for tensor in tensors:
        if sum(other.nbytes for other in shards[-1]) + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(tensor)
    total = sum(tensor.nbytes for tensor in tensors)
    task = progress.add_task("writing", total=total)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, [watched(tensor, progress, task) for tensor in shard], {"format": "pt"})
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def watched(tensor: NewTensor, progress: Progress, task: Any) -> NewTensor:
    """The tensor, telling the bar when its values are made."""

    def data() -> NDArray[Any]:
        progress.advance(task, tensor.nbytes)
        return tensor.data()

    return NewTensor(tensor.name, tensor.dtype, tensor.shape, data)


def new_tensor(name: str, shape: tuple[int, ...], seed: int, pool: NDArray[np.uint16]) -> NewTensor:
    """A tensor whose values follow from (seed, name): matrices are runs out of the pool of normals."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("e_score_correction_bias"):
        return NewTensor(name, "F32", shape, lambda: random.standard_normal(shape, np.float32) * np.float32(BIAS_STD))
    if len(shape) == 1:
        noise = random.standard_normal(shape, np.float32) * np.float32(NORM_NOISE)
        return NewTensor(name, "BF16", shape, lambda: to_bfloat16(1 + noise))
    return NewTensor(name, "BF16", shape, cut_from(pool, prod(shape), random))


def cut_from(pool: NDArray[np.uint16], count: int, random: np.random.Generator) -> Callable[[], NDArray[Any]]:
    """`count` values in runs that start at random places."""

    def data() -> NDArray[Any]:
        out = np.empty(count, pool.dtype)
        at = 0
        while at < count:
            start = int(random.integers(len(pool) // 2))
            run = min(count - at, int(random.integers(len(pool) // 8, len(pool) // 2)))
            out[at : at + run] = pool[start : start + run]
            at += run
        return out

    return data


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Bytes, five merges and padding up to the vocabulary; the special tokens at the config's ids."""
    size = config["vocab_size"]
    special = {config["bos_token_id"]: "<|bos|>", config["eos_token_id"]: "<|eos|>"}
    plain = iter([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)])
    names = [special.get(i) or next(plain, f"<|pad{i}|>") for i in range(size)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>",
        "model_max_length": 1 << 20, "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cut = Cut(arguments.layers, arguments.experts)
    folder = make_checkpoint(arguments.shape, arguments.out, cut, seed=arguments.seed)
    spec = ModelSpec.from_hf(folder)
    print(f"{folder}: {len(spec.layers)} layers, {spec.num_parameters / 1e9:.2f} B parameters")


if __name__ == "__main__":
    main()
