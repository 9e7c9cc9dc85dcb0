"""Rows of quantised safetensors weights: compressed-tensors' packed words, bytes and e2m1, AWQ and GPTQ.

`Sides` are a weight's own small tables (scales, zero points), read whole before its rows. A row's codes and scales come
out exactly as stored, so that `CodeRows.values` gives scale * (code - zero point). Names and shapes are checked in
`model/packed_plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.quantize import E4M3_VALUES
from coterie.model.dequant import to_float32
from coterie.model.formats.codes import CodeArray, CodeRows, FloatArray
from coterie.spec.stored import StoredScheme
from coterie.spec.weights import GROUPS, INT4_TABLE, MXFP4_TABLE, ScaleType, WeightFormat

RawBytes = NDArray[np.uint8]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each nibble of an AWQ word belongs to, lowest nibble first."""
_SCALES: dict[str, ScaleType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class Sides:
    """scales [rows or 1, groups] and, with zero points, unsigned zeros of the same shape."""

    scales: FloatArray
    zeros: CodeArray | None = None


def code_format(scheme: StoredScheme, cols: int, groups: int, scale_dtype: str) -> WeightFormat | None:
    """What a weight's codes mean; None if no kind of ours holds them (FP8, odd group sizes): then it becomes floats."""
    group = 0 if groups == 1 else cols // groups
    if scheme.layout == "fp8" or group not in GROUPS or group * groups not in (0, cols):
        return None
    if scheme.layout in ("mxfp4", "nvfp4"):
        return WeightFormat("code4", group, "e8m0" if scheme.layout == "mxfp4" else "f32", MXFP4_TABLE)
    if not scheme.symmetric:
        return WeightFormat("affine4" if scheme.bits == 4 else "affine8", group, "f32")
    scale = _SCALES.get(scale_dtype, "f32")
    if scheme.bits == 4:
        return WeightFormat("code4", group, scale, INT4_TABLE)
    return WeightFormat("int8", group, scale)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a weight is stored and what its codes mean; `form` None: they only become floats (`values`)."""

    scheme: StoredScheme
    form: WeightFormat | None


def decode(
    raw: RawBytes, first: int, shape: tuple[int, int], packed: PackedForm, sides: Sides
) -> CodeRows | FloatArray:
    """Rows [first, first + rows) of a weight, `shape` (rows, cols). AWQ and GPTQ come whole."""
    scheme = packed.scheme
    if scheme.layout == "fp8":
        return fp8_rows(raw, first, shape, sides.scales)
    codes, scales, mins = _codes(raw, first, shape, scheme, sides)
    if packed.form is not None:
        return CodeRows(packed.form, codes, scales, mins)
    return spread_out(codes, scales, mins, scheme)


def spread_out(codes: CodeArray, scales: FloatArray, mins: FloatArray | None, scheme: StoredScheme) -> FloatArray:
    """float32 values of codes whose groups no kind of ours has."""
    cols = codes.shape[1]
    width = -(-cols // scales.shape[1])
    values = codes.astype(np.float32)
    if scheme.layout in ("mxfp4", "nvfp4"):
        values = np.asarray(MXFP4_TABLE, np.float32).take(codes)
    elif scheme.symmetric:
        values -= 1 << (scheme.bits - 1)
    values *= np.repeat(scales, width, axis=1)[:, :cols]
    return values if mins is None else values - np.repeat(mins, width, axis=1)[:, :cols]


def _codes(
    raw: RawBytes, first: int, shape: tuple[int, int], scheme: StoredScheme, sides: Sides
) -> tuple[CodeArray, FloatArray, FloatArray | None]:
    rows, cols = shape
    if scheme.layout in ("awq", "gptq"):
        codes = _awq_codes(raw, shape) if scheme.layout == "awq" else _gptq_codes(raw, shape, scheme.bits)
    elif scheme.bits == 8:
        codes = raw.reshape(rows, -1)[:, :cols]
        if scheme.layout == "int8":
            codes = codes ^ np.uint8(0x80)
    else:
        codes = nibble_pairs(raw.reshape(rows, -1))[:, :cols]
    part = slice(first, first + rows) if len(sides.scales) > 1 else slice(0, 1)
    groups = sides.scales.shape[1]
    scales = np.broadcast_to(sides.scales[part], (rows, groups))
    if sides.zeros is None:
        return codes, scales, None
    zeros = np.broadcast_to(sides.zeros[part], (rows, groups))
    return codes, scales, scales * zeros


def nibble_pairs(packed: RawBytes) -> CodeArray:
    """Two codes of each byte, low nibble first."""
    out = np.empty((packed.shape[0], packed.shape[1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out.reshape(packed.shape[0], -1)


def _awq_codes(raw: RawBytes, shape: tuple[int, int]) -> CodeArray:
    """Words [cols, rows / 8], outputs of a word in AWQ's order, to [rows, cols]."""
    return np.ascontiguousarray(awq_order(nibble_pairs(raw.reshape(shape[1], -1))).T)


def awq_order(nibbles: CodeArray) -> CodeArray:
    """Nibbles [n, m] of AWQ words with the outputs in their order."""
    words = nibbles.reshape(len(nibbles), -1, 8)
    out = np.empty_like(words)
    out[:, :, list(AWQ_ORDER)] = words
    return out.reshape(nibbles.shape)


def _gptq_codes(raw: RawBytes, shape: tuple[int, int], bits: int) -> CodeArray:
    """Words [cols * bits / 32, rows], neighbouring inputs in one word, to [rows, cols]."""
    per_word = 32 // bits
    words = np.ascontiguousarray(raw.reshape(-1, shape[0], 4).swapaxes(0, 1))
    values = nibble_pairs(words.reshape(shape[0], -1)) if bits == 4 else words.reshape(shape[0], -1)
    assert values.shape == (shape[0], words.shape[1] * per_word)
    return values[:, : shape[1]]


def fp8_rows(raw: RawBytes, first: int, shape: tuple[int, int], scales: FloatArray) -> FloatArray:
    """e4m3 rows times one scale a row, or one for the matrix."""
    values = E4M3_VALUES.take(raw.reshape(shape))
    values *= scales[first : first + shape[0]] if len(scales) > 1 else scales
    return values


# ---- side tables -----------------------------------------------------------------------------------------------------
def scale_table(raw: RawBytes, dtype: str, rows: int, scheme: StoredScheme) -> FloatArray:
    """Scales as [rows or 1, groups]. MXFP4's are halved, as its codes are doubled."""
    if scheme.layout == "mxfp4":
        values = np.ldexp(np.float32(1), raw.astype(np.int32) - 128).astype(np.float32)
        values[raw == 255] = np.nan
    elif dtype == "F8_E4M3":
        values = E4M3_VALUES.take(raw)
    else:
        values = to_float32(raw, dtype)
    if scheme.layout in ("awq", "gptq"):
        return np.ascontiguousarray(values.reshape(-1, rows).T)
    return values.reshape(rows if values.size % rows == 0 and values.size > 1 else 1, -1).copy()


def zero_table(raw: RawBytes, rows: int, groups: int, scheme: StoredScheme) -> CodeArray:
    """Zero points as unsigned codes [rows or 1, groups]."""
    if scheme.layout == "int8":
        return (raw ^ np.uint8(0x80)).reshape(-1, groups)
    if scheme.layout == "awq":
        return np.ascontiguousarray(awq_order(nibble_pairs(raw.reshape(groups, -1))).T)
    if scheme.layout == "gptq":
        packed = raw.reshape(groups, -1)
        values = nibble_pairs(packed) if scheme.bits == 4 else packed
        return np.ascontiguousarray(((values[:, :rows] + np.uint8(scheme.offset)) & np.uint8((1 << scheme.bits) - 1)).T)
    words = np.ascontiguousarray(raw.reshape(-1, groups, 4).swapaxes(0, 1)).reshape(groups, -1)
    values = nibble_pairs(words) if scheme.bits == 4 else words
    return np.ascontiguousarray(values[:, :rows].T)
