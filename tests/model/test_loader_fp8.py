"""The loader against FP8 checkpoints: blocks of every shape, scales of every dtype, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loading import Tensors, check_every_value, load, refused
from tiny_checkpoints import (
    hf_tensors,
    tiny_spec,
    write_folder,
    write_in_order,
)

from coterie.model.loader import LoadError
from coterie.spec.model import Fp8BlockQuant


def fp8_checkpoint(tensors: Tensors, block: tuple[int, int], scale_dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """(stored, dequantised in float32): every matrix but embedding, head and router becomes e4m3 with block scales."""
    generator = torch.Generator().manual_seed(3)
    stored, plain = {}, {}
    for name, value in tensors.items():
        if value.ndim != 2 or name.startswith(("model.embed", "lm_head")) or name.endswith("mlp.gate.weight"):
            stored[name], plain[name] = value, value.float()
            continue
        codes = value.float().to(torch.float8_e4m3fn)
        table = [-(-size // step) for size, step in zip(value.shape, block, strict=True)]
        scale = torch.rand(table, generator=generator) + 0.5
        if scale_dtype == torch.float8_e8m0fnu:
            scale = torch.exp2(torch.randint(-4, 4, table, generator=generator).float())
        stored[name], stored[f"{name}_scale_inv"] = codes, scale.to(scale_dtype)
        wide = scale.to(scale_dtype).float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        plain[name] = codes.float() * wide[: value.shape[0], : value.shape[1]]
    return stored, plain


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(128, 128), (5, 8), (4, 3)])
def test_fp8_blocks(tmp_path: Path, block: tuple[int, int], scale_dtype: torch.dtype, dtype: str) -> None:
    stored, plain = fp8_checkpoint(hf_tensors(torch.bfloat16), block, scale_dtype)
    write_folder(tmp_path, stored)
    loaded, kernels = load(tmp_path, tiny_spec(quantization=Fp8BlockQuant(*block)), dtype=dtype)
    if dtype == "auto":
        assert loaded.kind == "bf16"
        plain = {k: v if v.ndim == 1 or k.endswith("gate.weight") else v.bfloat16().float() for k, v in plain.items()}
    check_every_value(loaded, kernels, plain)
    fp8 = [item for item in loaded.report.conversions if item.stored.startswith("F8_E4M3")]
    assert sum(item.tensors for item in fp8) == sum(name.endswith("_scale_inv") for name in stored)
    assert {item.exact for item in fp8} == {scale_dtype == torch.float8_e8m0fnu}


def test_fp8_with_dot_scale_names(tmp_path: Path) -> None:
    stored, plain = fp8_checkpoint(hf_tensors(torch.bfloat16), (5, 8), torch.float32)
    write_folder(tmp_path, {name.replace(".weight_scale_inv", ".scale"): value for name, value in stored.items()})
    loaded, kernels = load(tmp_path, tiny_spec(quantization=Fp8BlockQuant(5, 8)), dtype="float32")
    check_every_value(loaded, kernels, plain)


@pytest.mark.parametrize("shards", [1, 2])
def test_fp8_scales_behind_their_weights(tmp_path: Path, shards: int) -> None:
    stored, plain = fp8_checkpoint(hf_tensors(torch.bfloat16), (5, 8), torch.float32)
    code = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
    scales = {name: (code[value.dtype], value) for name, value in stored.items() if name.endswith("_scale_inv")}
    weights = {name: (code[value.dtype], value) for name, value in stored.items() if name not in scales}
    if shards == 1:
        write_in_order(tmp_path / "model.safetensors", {**weights, **scales})
    else:
        write_in_order(tmp_path / "a.safetensors", weights)
        write_in_order(tmp_path / "b.safetensors", scales)
    loaded, kernels = load(tmp_path, tiny_spec(quantization=Fp8BlockQuant(5, 8)), dtype="float32")
    check_every_value(loaded, kernels, plain)
    assert any(note.startswith(f"{len(scales)} scale tables lie behind") for note in loaded.report.notes)


@pytest.mark.parametrize("shape", [(576, 256), (129, 130), (1, 128), (200, 130), (128, 128)])
@pytest.mark.parametrize("chunk", [1, 7, 128, 1000])
def test_dequantisation_of_odd_shapes(shape: tuple[int, int], chunk: int) -> None:
    from coterie.model.dequant import BlockScale, dequantize_rows, scale_shape

    block = Fp8BlockQuant()
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    table = scale_shape(shape, block)
    assert table == (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.rand(table) + 0.5
    raw = codes.view(torch.uint8).numpy()
    parts = [
        dequantize_rows(raw[row : row + chunk], row, BlockScale(scale.numpy(), block))
        for row in range(0, shape[0], chunk)
    ]
    expected = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert np.concatenate(parts).tobytes() == expected.numpy().tobytes()


def test_every_stored_value_of_every_dtype() -> None:
    from coterie.kernels.quantize import E4M3_VALUES
    from coterie.model.dequant import fits_bfloat16, to_bfloat16, to_float32

    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3_VALUES, codes.view(torch.float8_e4m3fn).float().numpy())
    np.testing.assert_array_equal(
        to_float32(codes.numpy(), "F8_E8M0"), codes.view(torch.float8_e8m0fnu).float().numpy()
    )
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        np.testing.assert_array_equal(
            to_float32(words.view(torch.uint8).numpy(), name), words.view(dtype).float().numpy()
        )
    wide = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    ours = torch.from_numpy(to_bfloat16(wide.numpy())).view(torch.bfloat16).float()
    np.testing.assert_array_equal(ours.numpy(), wide.bfloat16().float().numpy())
    assert fits_bfloat16(ours.numpy()) and not fits_bfloat16(wide.numpy())


def test_fp8_problems_are_named(tmp_path: Path) -> None:
    block = (5, 8)
    stored, _ = fp8_checkpoint(hf_tensors(torch.bfloat16), block, torch.float32)
    spec = tiny_spec(quantization=Fp8BlockQuant(*block))
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    cases = {
        "wrong table": ({**stored, name: stored[name][:-1].clone()}, spec, "in blocks of 5x8 needs [5, 2]"),
        "no table": ({k: v for k, v in stored.items() if k != name}, spec, "has no scale table"),
        "odd table": ({**stored, name: stored[name].to(torch.int32)}, spec, "scales can be"),
        "no config": (stored, tiny_spec(), "weight_block_size"),
        "two tables": (
            {**stored, name.replace("weight_scale_inv", "scale"): stored[name].clone()},
            spec,
            "two scale tables",
        ),
    }
    for case, (tensors, wanted, says) in cases.items():
        write_folder(tmp_path / case, tensors)
        assert says in str(refused(tmp_path / case, wanted)), case


def test_a_nan_scale_is_a_named_error(tmp_path: Path) -> None:
    stored, _ = fp8_checkpoint(hf_tensors(torch.bfloat16), (5, 8), torch.float32)
    stored["model.layers.0.self_attn.o_proj.weight_scale_inv"][0, 0] = float("nan")
    write_folder(tmp_path, stored)
    with pytest.raises(LoadError, match=r"o_proj\.weight_scale_inv' holds NaN"):
        load(tmp_path, tiny_spec(quantization=Fp8BlockQuant(5, 8)))
