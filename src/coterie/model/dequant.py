"""Stored values to float32 and back: plain floats, and DeepSeek's FP8 (e4m3) with block scales.

Pure arithmetic on numpy arrays; which tensor has which scale is decided in `load_plan`, reading is `safetensors_io`.
A block-scaled weight is `table[code] * scale[row // block_rows, col // block_cols]`; the last blocks may be short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.quantize import E4M3_VALUES
from coterie.model.formats.codes import CodeRows
from coterie.spec.model import Fp8BlockQuant
from coterie.spec.weights import GROUPS, WeightFormat

PLAIN_DTYPES = ("F32", "BF16", "F16")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")

FloatArray = NDArray[np.float32]


def to_float32(raw: NDArray[np.uint8], dtype: str) -> FloatArray:
    """Decode bytes of a plain float dtype or of F8_E8M0 scales, exactly. F32 is a view of `raw`, others are new."""
    if dtype == "F32":
        return raw.view("<f4")
    if dtype == "BF16":
        bits = raw.view("<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "F8_E8M0":
        values = np.ldexp(np.float32(1), np.minimum(raw, 254).astype(np.int32) - 127).astype(np.float32)
        values[raw == 255] = np.nan
        return values
    raise ValueError(f"dtype {dtype} is not a plain float")


def to_bfloat16(values: FloatArray) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def fits_bfloat16(values: FloatArray) -> bool:
    """Whether every value is a bfloat16 exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return not bool((bits & np.uint32(0xFFFF)).any())


@dataclass(frozen=True, slots=True)
class BlockScale:
    """Scales [ceil(rows / block_rows), ceil(cols / block_cols)] of one weight."""

    table: FloatArray
    block: Fp8BlockQuant

    @property
    def is_power_of_two(self) -> bool:
        """Products with such scales are exact, in bfloat16 too: e4m3 has four significant bits."""
        return bool((np.frexp(self.table)[0] == 0.5).all())

    @property
    def fp8_format(self) -> WeightFormat | None:
        """The format that holds such a weight as it is, one scale a row and group; None if blocks are of odd width."""
        return WeightFormat("fp8", self.block.block_cols) if self.block.block_cols in GROUPS else None


def scale_shape(shape: tuple[int, int], block: Fp8BlockQuant) -> tuple[int, int]:
    """The scale table that a weight [rows, cols] must have."""
    return -(-shape[0] // block.block_rows), -(-shape[1] // block.block_cols)


def fp8_codes(codes: NDArray[np.uint8], row: int, scale: BlockScale) -> CodeRows | None:
    """Rows [row, row + n) of an e4m3 weight as they are, with the scale of their block for every row."""
    form = scale.fp8_format
    if form is None:
        return None
    return CodeRows(form, codes, scale.table[(row + np.arange(len(codes))) // scale.block.block_rows])


def dequantize_rows(codes: NDArray[np.uint8], row: int, scale: BlockScale) -> FloatArray:
    """Rows [row, row + n) of an e4m3 weight, codes [n, cols], times their block scales, in float32."""
    values = E4M3_VALUES.take(codes)
    count, cols = codes.shape
    at = 0
    while at < count:
        block_row = (row + at) // scale.block.block_rows
        end = min(count, (block_row + 1) * scale.block.block_rows - row)
        values[at:end] *= np.repeat(scale.table[block_row], scale.block.block_cols)[:cols]
        at = end
    return values
