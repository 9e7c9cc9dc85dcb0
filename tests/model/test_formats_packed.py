"""Quantised safetensors weights against their packers: compressed-tensors' own code, AWQ and GPTQ written plainly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from coterie.model.formats.codes import CodeRows
from coterie.model.formats.packed import (
    AWQ_ORDER,
    PackedForm,
    Sides,
    code_format,
    decode,
    fp8_rows,
    scale_table,
    zero_table,
)
from coterie.spec.stored import StoredScheme

ROWS, COLS = 24, 128


def compressor(name: str) -> type[BaseCompressor]:
    return BaseCompressor.get_value_from_registry(name)


def raw(value: torch.Tensor) -> np.ndarray:
    return value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()


def stored(form: str, scheme: StoredScheme, args: dict, zeros: bool = False) -> tuple[dict, np.ndarray]:
    """A weight as compressed-tensors stores it, and its values as compressed-tensors reads it back."""
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(ROWS, COLS, generator=rng)
    groups = 1 if scheme.group == 0 else COLS // scheme.group
    scale = weight.reshape(ROWS, groups, -1).abs().amax(-1) / {4: 7.0, 8: 127.0}[scheme.bits]
    if form.startswith("mxfp4"):
        scale = torch.exp2(torch.floor(torch.log2(scale * 7 / 6)))
    if form == "float-quantized":
        scale = weight.abs().amax(-1, keepdim=True) / 448
    # As in files: scales have 16 bits, so that scale * zero point is exact. In float32, so that the oracle rounds less.
    state = {"weight": weight, "weight_scale": scale.bfloat16().float()}
    if zeros:
        limit = 1 << (scheme.bits - 1)
        state["weight_zero_point"] = torch.randint(-limit, limit, scale.shape, generator=rng).to(torch.int8)
    plan = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    packed = compressor(form).compress(state, plan)
    return packed, compressor(form).decompress(dict(packed), plan)["weight"].float().numpy()


def values_of(rows: CodeRows | np.ndarray) -> np.ndarray:
    assert isinstance(rows, CodeRows)
    return rows.values()


def sides_of(packed: dict, scheme: StoredScheme) -> Sides:
    scale = packed["weight_scale"]
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[scale.dtype]
    scales = scale_table(raw(scale), dtype, ROWS, scheme)
    zero = packed.get("weight_zero_point")
    return Sides(scales, None if zero is None else zero_table(raw(zero), ROWS, scales.shape[1], scheme))


G128 = {"num_bits": 4, "group_size": 128}
G64 = {"num_bits": 8, "group_size": 64}
ROW = {"strategy": "channel"}
ASYM = {"symmetric": False}
CASES: dict[str, tuple[str, StoredScheme, dict, bool]] = {
    "int4-g32": ("pack-quantized", StoredScheme("pack", 4, 32), {"num_bits": 4, "group_size": 32}, False),
    "int4-g128-zeros": ("pack-quantized", StoredScheme("pack", 4, 128, False), G128 | ASYM, True),
    "int4-row": ("pack-quantized", StoredScheme("pack", 4, 0), {"num_bits": 4} | ROW, False),
    "int4-row-zeros": ("pack-quantized", StoredScheme("pack", 4, 0, False), {"num_bits": 4} | ROW | ASYM, True),
    "int8-packed-g64": ("pack-quantized", StoredScheme("pack", 8, 64), G64, False),
    "int8-packed-zeros": ("pack-quantized", StoredScheme("pack", 8, 64, False), G64 | ASYM, True),
    "int8-row": ("int-quantized", StoredScheme("int8", 8, 0), {"num_bits": 8} | ROW, False),
    "int8-row-zeros": ("int-quantized", StoredScheme("int8", 8, 0, False), {"num_bits": 8} | ROW | ASYM, True),
    "mxfp4": ("mxfp4-pack-quantized", StoredScheme("mxfp4", 4, 32), {"num_bits": 4, "type": "float", "group_size": 32},
              False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_compressed_tensors(name: str) -> None:
    form, scheme, args, zeros = CASES[name]
    packed, values = stored(form, scheme, args, zeros)
    main = packed.get("weight_packed", packed.get("weight"))
    sides = sides_of(packed, scheme)
    held = code_format(scheme, COLS, sides.scales.shape[1], "F32")
    assert held is not None and (held.group or COLS) == (scheme.group or COLS)
    codes = decode(raw(main), 0, (ROWS, COLS), PackedForm(scheme, held), sides)
    np.testing.assert_array_equal(values_of(codes), values)
    assert isinstance(codes, CodeRows) and (codes.codes.max() < 16) == (scheme.bits == 4)
    rows = raw(main).reshape(ROWS, -1)[5:9].reshape(-1)
    np.testing.assert_array_equal(values_of(decode(rows, 5, (4, COLS), PackedForm(scheme, held), sides)), values[5:9])
    np.testing.assert_array_equal(decode(rows, 5, (4, COLS), PackedForm(scheme, None), sides), values[5:9])


def test_one_scale_for_the_whole_matrix() -> None:
    scheme = StoredScheme("int8", 8, -1)
    codes = np.arange(ROWS * COLS, dtype=np.uint8)
    sides = Sides(scale_table(np.float32([0.5]).view(np.uint8), "F32", ROWS, scheme))
    held = code_format(scheme, COLS, 1, "F32")
    assert held is not None
    values = values_of(decode(codes, 0, (ROWS, COLS), PackedForm(scheme, held), sides))
    np.testing.assert_array_equal(values, codes.view(np.int8).reshape(ROWS, COLS) * np.float32(0.5))


def test_fp8_with_a_scale_per_row() -> None:
    scheme = StoredScheme("fp8", 8, 0)
    packed, values = stored("float-quantized", scheme, {"num_bits": 8, "type": "float", "strategy": "channel"})
    assert packed["weight"].dtype == torch.float8_e4m3fn
    scales = scale_table(raw(packed["weight_scale"]), "F32", ROWS, scheme)
    np.testing.assert_array_equal(fp8_rows(raw(packed["weight"]), 0, (ROWS, COLS), scales), values)
    rows = raw(packed["weight"]).reshape(ROWS, -1)[7:9].reshape(-1)
    np.testing.assert_array_equal(fp8_rows(rows, 7, (2, COLS), scales), values[7:9])
    assert code_format(scheme, COLS, 1, "F32") is None


@pytest.mark.parametrize("group", [32, 64])
def test_awq(group: int) -> None:
    """w = s (q - z); words along the outputs, eight of them in AWQ's own order."""
    rng = np.random.default_rng(2)
    q = rng.integers(0, 16, (ROWS, COLS))
    z, s = rng.integers(0, 16, (ROWS, COLS // group)), rng.random((ROWS, COLS // group)).astype(np.float16)

    def pack(values: np.ndarray) -> np.ndarray:
        words = np.zeros((values.shape[0], ROWS // 8), np.uint32)
        for place, output in enumerate(AWQ_ORDER):
            words |= values[:, output::8].astype(np.uint32) << np.uint32(4 * place)
        return words.reshape(-1).view(np.uint8)

    scheme = StoredScheme("awq", 4, group, False)
    scales = scale_table(np.ascontiguousarray(s.T).view(np.uint8).reshape(-1), "F16", ROWS, scheme)
    sides = Sides(scales, zero_table(pack(z.T), ROWS, COLS // group, scheme))
    held = code_format(scheme, COLS, COLS // group, "F16")
    assert held is not None and held.kind == "affine4"
    ours = values_of(decode(pack(q.T), 0, (ROWS, COLS), PackedForm(scheme, held), sides))
    expected = np.repeat(s.astype(np.float32), group, 1) * (q - np.repeat(z, group, 1))
    np.testing.assert_array_equal(ours, expected.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0, 1])
def test_gptq(bits: int, offset: int) -> None:
    """Words along the inputs, lowest first; the first format stores zero points less one."""
    rng, group, per = np.random.default_rng(3), 64, 32 // bits
    q = rng.integers(0, 1 << bits, (ROWS, COLS))
    z, s = rng.integers(1, 1 << bits, (ROWS, COLS // group)), rng.random((ROWS, COLS // group)).astype(np.float16)

    def pack(values: np.ndarray) -> np.ndarray:
        """Neighbouring rows into one word."""
        words = np.zeros((values.shape[0] // per, values.shape[1]), np.uint32)
        for place in range(per):
            words |= values[place::per].astype(np.uint32) << np.uint32(bits * place)
        return words

    scheme = StoredScheme("gptq", bits, group, False, offset=offset)
    zeros = np.ascontiguousarray(pack(z - offset).T)
    scales = scale_table(np.ascontiguousarray(s.T).view(np.uint8).reshape(-1), "F16", ROWS, scheme)
    sides = Sides(scales, zero_table(zeros.view(np.uint8).reshape(-1), ROWS, COLS // group, scheme))
    held = code_format(scheme, COLS, COLS // group, "F16")
    assert held is not None and held.kind == f"affine{bits}"
    words = np.ascontiguousarray(pack(q.T))
    ours = values_of(decode(words.view(np.uint8).reshape(-1), 0, (ROWS, COLS), PackedForm(scheme, held), sides))
    expected = np.repeat(s.astype(np.float32), group, 1) * (q - np.repeat(z, group, 1))
    np.testing.assert_array_equal(ours, expected.astype(np.float32))


def test_scales_that_are_no_numbers_are_seen() -> None:
    scheme = StoredScheme("mxfp4", 4, 32)
    scales = scale_table(np.full(ROWS * 4, 255, np.uint8), "U8", ROWS, scheme)
    held = code_format(scheme, COLS, 4, "U8")
    assert held is not None and not CodeRows(held, np.zeros((ROWS, COLS), np.uint8), scales).is_finite
    assert code_format(StoredScheme("pack", 4, 48), 96, 2, "F32") is None, "no kind of ours has groups of 48"
