"""Quantised safetensors folders: compressed-tensors, AWQ, GPTQ, packed by their own code (or written plainly here).

A folder gives, in float32, bit for bit the logits of the same folder with the dequantised weights; as it is by default
its codes are held exactly and products differ by the rounding of activations only. Wrong folders are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from entries import ALL_CASES, Case
from oracle import Oracle, prompt
from safetensors.torch import load_file, save_file

from coterie import LLM
from coterie.kernels.native import NativeKernels
from coterie.model.checkpoint import open_checkpoint
from coterie.model.load_plan import make_plan
from coterie.model.loader import load_weights
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.weights import F32, WeightFormat

OPTIONS: dict[str, Any] = {"max_model_len": 256, "page_size": 16, "threads": 1, "kv_cache_tokens": 512}
MODELS = ("mixtral", "ds3")
CASES = {case.entry.id: case for case in ALL_CASES if case.entry.id in MODELS}
PROJECTION = re.compile(r".*(_proj|\.w[123])\.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Get = Callable[[Case], Oracle]
Parts = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]


def compressed(weight: torch.Tensor, form: str, args: dict[str, Any]) -> tuple[Parts, torch.Tensor]:
    """A weight in a compressed-tensors format, and its values as that library reads them back."""
    size = args.get("group_size") or weight.shape[1]
    bits, is_float, zeros = args["num_bits"], args.get("type") == "float", not args.get("symmetric", True)
    groups = weight.reshape(weight.shape[0], -1, size)
    most = {(4, False): 7.0, (8, False): 127.0, (8, True): 448.0, (4, True): 6.0}[bits, is_float]
    scale = groups.abs().amax(-1) / most
    if form.startswith("mxfp4"):
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    state = {"weight": weight, "weight_scale": scale.bfloat16().float()}
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([448.0 / float(scale.max())])
        state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    if zeros:
        state["weight_zero_point"] = torch.full_like(scale, 3).to(torch.int8)
    plan = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    code = BaseCompressor.get_value_from_registry(form)
    packed = code.compress(state, plan)
    values = code.decompress(dict(packed), plan)["weight"].float()
    if form.startswith("nvfp4"):  # decompress works in bfloat16
        units = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
        scale = packed["weight_scale"].float() / packed["weight_global_scale"]
        values = units * scale.repeat_interleave(16, 1)
    return {f".{name}": value.contiguous() for name, value in packed.items()}, values


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Neighbouring columns into 32-bit words, lowest first."""
    per = 32 // bits
    shifts = torch.arange(per) * bits
    packed = (values.reshape(values.shape[0], -1, per).to(torch.int64) << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def affine(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, zero points, scales, values) with w = s (q - z)."""
    groups = weight.reshape(weight.shape[0], -1, size)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    zero = torch.clamp(torch.round(-low / scale), 1, (1 << bits) - 1)
    codes = torch.clamp(torch.round(groups / scale[..., None]) + zero[..., None], 0, (1 << bits) - 1)
    values = (codes - zero[..., None]) * scale[..., None]
    return codes.reshape(weight.shape), zero, scale, values.reshape(weight.shape)


def awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, zero, scale, values = affine(weight, 4, 32)
    order = torch.tensor(AWQ_ORDER)

    def pack(table: torch.Tensor) -> torch.Tensor:
        return words(table.T.reshape(table.shape[1], -1, 8)[:, :, order].reshape(table.shape[1], -1), 4)

    return {".qweight": pack(codes), ".qzeros": pack(zero), ".scales": scale.T.half().contiguous()}, values


def gptq(weight: torch.Tensor, bits: int = 4, offset: int = 1) -> tuple[Parts, torch.Tensor]:
    codes, zero, scale, values = affine(weight, bits, 32)
    parts = {
        ".qweight": words(codes, bits).T.contiguous(), ".qzeros": words(zero.T.contiguous() - offset, bits),
        ".scales": scale.T.half().contiguous(),
        ".g_idx": (torch.arange(weight.shape[1]) // 32).to(torch.int32),
    }  # fmt: skip
    return parts, values


def ct_config(form: str, args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False, **args}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"], "kv_cache_scheme": None, **changes,
    }  # fmt: skip


G32 = {"num_bits": 4, "group_size": 32, "strategy": "group"}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
CT_FORMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "int4": ("pack-quantized", G32, "int4"),
    "int4-zeros": ("pack-quantized", {**G32, "symmetric": False}, "affine4"),
    "int8-packed": ("pack-quantized", {**G32, "num_bits": 8}, "int8"),
    "int8-row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, "int8 row"),
    "fp8-row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "f32"),
    "mxfp4": ("mxfp4-pack-quantized", {**G32, "type": "float"}, "mxfp4"),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, "mxfp4"),
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
OTHERS: dict[str, tuple[Pack, dict[str, Any], str]] = {
    "awq": (awq, AWQ, "affine4"),
    "gptq": (gptq, GPTQ, "affine4"),
    "gptq-8-bits": (lambda weight: gptq(weight, 8), {**GPTQ, "bits": 8}, "affine8"),
    "gptq-v2": (lambda weight: gptq(weight, 4, 0), {**GPTQ, "checkpoint_format": "gptq_v2"}, "affine4"),
}


def write_both(oracle: Oracle, folder: Path, pack: Pack, config: dict[str, Any]) -> None:
    """`packed` and `wide` under the folder: the quantised checkpoint and the same with its values in float32."""
    tensors: Parts = {}
    for file in oracle.folder.glob("*.safetensors"):
        tensors |= load_file(file)
    packed, wide = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if PROJECTION.fullmatch(name) and value.shape[0] % 8 == 0 and value.shape[1] % 32 == 0:
            parts, wide[name] = pack(value)
            del packed[name]
            packed |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    base = json.loads((oracle.folder / "config.json").read_text())
    for name, content, extra in (("packed", packed, {"quantization_config": config}), ("wide", wide, {})):
        (folder / name).mkdir()
        save_file({key: value.contiguous() for key, value in content.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps({**base, **extra}))


def logits(folder: Path, **options: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    with LLM(folder, **OPTIONS, **options) as llm:
        return llm.logits(prompt(40, seed=1)), llm.load_lines


def check(folder: Path, oracle: Oracle, label: str) -> None:
    wide, _ = logits(folder / "wide")
    ours, lines = logits(folder / "packed", dtype="float32")
    np.testing.assert_array_equal(ours, wide)
    assert np.abs(wide - oracle.logits(prompt(40, seed=1))).max() > 1e-3, "quantising made no difference"
    held = banks(folder / "packed")
    for key, values in banks(folder / "wide").items():
        form, stored = held[key]
        if form.is_scaled or form == F32:
            np.testing.assert_array_equal(stored, values[1], err_msg=f"{key} {form}")
    assert label in {form.label().split(" g")[0] for form, _ in held.values()}, lines


def banks(folder: Path) -> dict[str, tuple[WeightFormat, np.ndarray]]:
    """Every bank's format and values as the native kernels hold them by default."""
    spec, kernels = ModelSpec.from_hf(folder), NativeKernels(1)
    plan = make_plan(open_checkpoint(folder), spec, "auto", mtp=True)
    weights = load_weights(folder, spec, kernels).weights
    return {
        key: (plan.bank_formats[key], np.stack([kernels.read(weights[key], i) for i in range(size.count)]))
        for key, size in plan.layout.banks.items()
    }


@pytest.mark.parametrize("name", CT_FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_compressed_tensors(name: str, model: str, oracle_of: Get, tmp_path: Path) -> None:
    form, args, label = CT_FORMS[name]
    oracle = oracle_of(CASES[model])
    write_both(oracle, tmp_path, lambda weight: compressed(weight, form, args), ct_config(form, args))
    check(tmp_path, oracle, label)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_awq_and_gptq(name: str, model: str, oracle_of: Get, tmp_path: Path) -> None:
    pack, config, label = OTHERS[name]
    oracle = oracle_of(CASES[model])
    write_both(oracle, tmp_path, pack, config)
    check(tmp_path, oracle, label)


def v4_experts(folder: Path) -> None:
    """DeepSeek-V4's layout of an expert: e2m1 pairs as int8 under the plain name, powers of two as `scale`."""
    path = folder / "packed" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        tensors[f"{stem}.weight"] = tensors.pop(name).view(torch.int8)
        tensors[f"{stem}.scale"] = tensors.pop(f"{stem}.weight_scale").view(torch.float8_e8m0fnu)
    save_file(tensors, path)
    config = json.loads((folder / "packed" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "packed" / "config.json").write_text(json.dumps(config))


def test_mxfp4_in_deepseeks_layout(oracle_of: Get, tmp_path: Path) -> None:
    form, args, label = CT_FORMS["mxfp4"]
    oracle = oracle_of(CASES["ds3"])
    write_both(oracle, tmp_path, lambda weight: compressed(weight, form, args), ct_config(form, args))
    v4_experts(tmp_path)
    check(tmp_path, oracle, label)


@pytest.fixture(scope="module")
def int4(oracle_of: Get, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int4")
    form, args, _ = CT_FORMS["int4-zeros"]
    oracle = oracle_of(CASES["mixtral"])
    write_both(oracle, folder, lambda weight: compressed(weight, form, args), ct_config(form, args))
    return folder / "packed"


STEM = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{STEM}.weight_scale"), "has no table of scales"),
        (lambda t: t.pop(f"{STEM}.weight_zero_point"), "disagree about whether there are any"),
        (lambda t: t.update({f"{STEM}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}), "inputs in another order"),
        (lambda t: t.update({f"{STEM}.weight_packed": torch.zeros(64, 7).int()}), r"is I32 \[64, 7\]; a weight"),
        (lambda t: t.update({f"{STEM}.weight_packed": torch.zeros(64, 8)}), "of 4 bits needs I32"),
        (lambda t: t.update({f"{STEM}.weight_scale": torch.ones(64, 4)}), "groups of 32 need 2 a row"),
        (lambda t: t.update({f"{STEM}.weight_scale": torch.ones(64, 2, dtype=torch.int32)}), "scales can be F32"),
        (lambda t: t.update({f"{STEM}.weight_scale": torch.full((64, 2), torch.nan)}), "holds NaN or infinity"),
        (lambda t: t.update({f"{STEM}.surprise": torch.ones(3)}), "belongs to no part"),
    ],
)  # fmt: skip
def test_broken_folders_are_refused_by_name(
    change: Callable[[Parts], Any], said: str, int4: Path, tmp_path: Path
) -> None:
    tensors = load_file(int4 / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((int4 / "config.json").read_text())
    with pytest.raises(CoterieError, match=said) as caught:
        LLM(tmp_path, **OPTIONS)
    assert "q_proj" in str(caught.value)


def test_a_weight_that_the_config_ignores_is_not_packed(int4: Path, tmp_path: Path) -> None:
    config = json.loads((int4 / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*layers.0.self_attn.*")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(int4 / "model.safetensors")
    with pytest.raises(CoterieError, match=r"q_proj.*is packed, but config\.json says that it is not quantised"):
        LLM(tmp_path, **OPTIONS)


def test_g_idx_of_gptq_must_be_in_order(oracle_of: Get, tmp_path: Path) -> None:
    def shuffled(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        parts, values = gptq(weight)
        return {**parts, ".g_idx": parts[".g_idx"].flip(0).contiguous()}, values

    write_both(oracle_of(CASES["mixtral"]), tmp_path, shuffled, OTHERS["gptq"][1])
    with pytest.raises(CoterieError, match="puts the inputs in another order"):
        LLM(tmp_path / "packed", **OPTIONS)
