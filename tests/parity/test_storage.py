"""One model in every form a checkpoint comes in: the logits are transformers' for the weights as they are stored.

Shards, bfloat16, float16, DeepSeek's FP8 in blocks, foreign prefixes under a `text_config`, transformers' inner names.
What is stored narrower gives other weights, so the oracle is loaded from the stored values, widened to float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from entries import ALL_CASES, Case
from oracle import Oracle, prompt
from safetensors.torch import load_file, save_file

from coterie import LLM
from coterie.kernels.machine import machine

Tensors = dict[str, torch.Tensor]
IDS = ("ds3", "v3-odd-sizes", "glm4-moe-groups-three-quarters", "mixtral", "qwen2-moe", "qwen3-yarn-tied")
CASES = [case for case in ALL_CASES if case.entry.id in IDS]
LENGTHS = (1, 37, 130)
OPTIONS: dict[str, Any] = {"max_model_len": 256, "page_size": 16, "threads": 1, "kv_cache_tokens": 512}
EXACT: dict[str, Any] = {"isa": [level for level in machine().isa_levels if not level.startswith("amx")][-1]}
"""The best level that keeps float32 rows before bf16 weights; AMX tiles round them."""


@dataclass(frozen=True)
class Stored:
    """What is written, the values that it stands for, and what config.json says about it."""

    tensors: Tensors
    values: Tensors
    config: dict[str, Any] = field(default_factory=dict)


def rounded(tensors: Tensors, dtype: torch.dtype) -> Stored:
    stored = {name: value if "correction_bias" in name else value.to(dtype) for name, value in tensors.items()}
    return Stored(stored, stored, {"dtype": str(dtype).removeprefix("torch.")})


def fp8(tensors: Tensors, block: tuple[int, int], *, power_of_two: bool) -> Stored:
    """Projections as e4m3 with a scale per block, the last blocks short; everything else bfloat16."""
    stored, values = {}, {}
    for name, value in tensors.items():
        if value.ndim == 2 and any(part in name for part in ("_proj.", ".w1.", ".w2.", ".w3.")):
            values[name], stored[name], stored[f"{name}_scale_inv"] = _quantised(
                value, block, power_of_two=power_of_two
            )
        else:
            values[name] = stored[name] = value if "correction_bias" in name else value.bfloat16()
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    return Stored(stored, values, {"dtype": "bfloat16", "quantization_config": quantisation})


def _quantised(
    weight: torch.Tensor, block: tuple[int, int], *, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dequantised, codes, scales)."""
    (rows, cols), (height, width) = weight.shape, block
    scales = torch.stack(
        [torch.stack([part.abs().max() for part in strip.split(width, 1)]) for strip in weight.split(height)]
    )
    scales = scales / 448
    if power_of_two:
        scales = torch.exp2(scales.log2().ceil())
    wide = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes.float() * wide, codes, scales.to(torch.float8_e8m0fnu) if power_of_two else scales


def nested(tensors: Tensors) -> Stored:
    moved = {f"language_model.{name}": value for name, value in tensors.items()}
    return Stored(moved, tensors)


FORMS: dict[str, Callable[[Tensors], Stored]] = {
    "bfloat16": lambda tensors: rounded(tensors, torch.bfloat16),
    "float16": lambda tensors: rounded(tensors, torch.float16),
    "fp8-128": lambda tensors: fp8(tensors, (128, 128), power_of_two=False),
    "fp8-short-blocks": lambda tensors: fp8(tensors, (16, 40), power_of_two=False),
    "fp8-ue8m0": lambda tensors: fp8(tensors, (32, 8), power_of_two=True),
    "nested": nested,
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder and the oracle for the values in it."""

    case: Case
    model: torch.nn.Module
    folder: Path

    def expected(self, token_ids: list[int], cache: transformers.Cache | None = None) -> np.ndarray:
        with torch.no_grad():
            output = self.model(torch.tensor([token_ids]), past_key_values=cache, use_cache=cache is not None)
        return output.logits[0].numpy()

    def check(self, llm: LLM) -> None:
        for length in LENGTHS:
            token_ids = prompt(length, seed=length)
            theirs = self.expected(token_ids)
            assert np.abs(theirs).max() > 1
            np.testing.assert_allclose(llm.logits(token_ids), theirs, atol=self.case.entry.tolerance, rtol=0)


def in_forms(*forms: str) -> pytest.MarkDecorator:
    """Every case in each of the forms."""
    pairs = [(case, form) for case in CASES for form in forms]
    names = [f"{case.entry.id}-{form}" for case, form in pairs]
    return pytest.mark.parametrize("checkpoint", pairs, ids=names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.set_num_threads(1)
    case, form = request.param
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("stored")
    oracle = Oracle(case.entry, source)
    tensors = load_file(source / "model.safetensors")
    stored = FORMS[form](tensors)
    widened = {name: value.float().contiguous() for name, value in stored.values.items()}
    save_file(widened, source / "model.safetensors", {"format": "pt"})
    model = type(oracle.model).from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"
    save_file({name: value.contiguous() for name, value in stored.tensors.items()}, folder / "model.safetensors")
    config = {**json.loads((source / "config.json").read_text()), **case.override, **stored.config}
    if form == "nested":
        config = {
            "model_type": "wrapper",
            "text_config": config,
            "tie_word_embeddings": not case.entry.config["tie_word_embeddings"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(case, model, folder)


@in_forms(*FORMS)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_logits_are_those_of_the_stored_values(checkpoint: Checkpoint, backend: str) -> None:
    with LLM(checkpoint.folder, backend=backend, dtype="float32", **OPTIONS) as llm:
        checkpoint.check(llm)


@in_forms("bfloat16", "float16", "fp8-ue8m0")
def test_dtype_auto_loses_nothing(checkpoint: Checkpoint) -> None:
    """bfloat16 holds e4m3 times a power of two exactly."""
    with LLM(checkpoint.folder, kv_cache_dtype="float32", **OPTIONS, **EXACT) as llm:
        checkpoint.check(llm)


class NarrowCache(transformers.DynamicCache):
    """What a bfloat16 cache holds: keys and values, or MLA's latent and rope key, rounded when they are stored."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return super().update(key.bfloat16().float(), value.bfloat16().float(), *rest, **named)


@in_forms("bfloat16")
def test_bfloat16_cache_rounds_what_it_stores_and_nothing_else(checkpoint: Checkpoint) -> None:
    token_ids = prompt(100, seed=3)
    with LLM(checkpoint.folder, kv_cache_dtype="bfloat16", **OPTIONS, **EXACT) as llm:
        ours = llm.logits(token_ids)
    theirs = checkpoint.expected(token_ids, NarrowCache())
    relative = float(np.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean()))
    assert relative < 1e-3, "a value between two bfloat16 may round the other way; more than that is another mistake"
    unrounded = checkpoint.expected(token_ids)
    assert np.abs(theirs - unrounded).max() > 10 * np.abs(ours - theirs).max()


@in_forms("bfloat16")
def test_int8_cache_is_one_rounding_for_both_backends_and_any_chunks(checkpoint: Checkpoint) -> None:
    token_ids = prompt(100, seed=3)
    logits = {}
    for backend, cache, chunk in [("native", "float32", 64), ("native", "int8", 64), ("native", "int8", 7),
                                  ("reference", "int8", 64)]:  # fmt: skip
        options = {"backend": backend, "kv_cache_dtype": cache, "chunked_prefill_size": chunk}
        options |= EXACT if backend == "native" else {}
        with LLM(checkpoint.folder, **OPTIONS, **options) as llm:
            logits[backend, cache, chunk] = llm.logits(token_ids)
    exact, ours = logits["native", "float32", 64], logits["native", "int8", 64]
    assert logits["native", "int8", 7].tobytes() == ours.tobytes()
    size = float(np.sqrt(np.square(exact).mean()))
    between = float(np.sqrt(np.square(ours - logits["reference", "int8", 64]).mean())) / size
    lost = float(np.sqrt(np.square(ours - exact).mean())) / size
    assert between < 0.3 * lost, "a value between two codes may round the other way; more is another mistake"
    assert 0 < lost < 0.25, "a router of random weights may choose another expert"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.entry.id)
@pytest.mark.parametrize("how", [{"max_shard_size": "20KB"}, {"save_original_format": False}], ids=["shards", "inner"])
def test_what_transformers_writes(case: Case, how: dict[str, Any], tmp_path: Path) -> None:
    """Small shards with an index; the names that transformers 5 uses inside (stacked experts)."""
    torch.set_num_threads(1)
    oracle = Oracle(case.entry, tmp_path / "plain")
    folder = tmp_path / "saved"
    oracle.model.save_pretrained(folder, **how)
    assert len(list(folder.glob("*.safetensors"))) > ("max_shard_size" in how)
    with LLM(folder, dtype="float32", **OPTIONS) as llm:
        Checkpoint(case, oracle.model, folder).check(llm)
