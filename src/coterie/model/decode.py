"""Decoder: the bytes of planned tensors as rows that a bank takes: float32, bfloat16 bits, or codes with scales.

Keeps the side tables (scales, zero points) that were read before their weight, and lets them go after its last row.
The loader says when; what the bytes mean is `dequant`'s and the formats' matter.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.model.banks import Rows
from coterie.model.dequant import PLAIN_DTYPES, BlockScale, dequantize_rows, fp8_codes, to_float32
from coterie.model.formats.codes import CodeRows, FloatArray
from coterie.model.formats.ggml import DECODERS, decode, expand
from coterie.model.formats.packed import Sides, scale_table, zero_table
from coterie.model.formats.packed import decode as decode_packed
from coterie.model.load_plan import PlannedTensor
from coterie.model.packed_plan import Packed
from coterie.model.safetensors_io import LoadError, Piece, RawBytes, StoredTensor
from coterie.spec.model import Fp8BlockQuant

_T = TypeVar("_T", np.float32, np.uint16)


class Decoder:
    """`block`: of the checkpoint's FP8 format, if it has one. `keep_fp8`: some bank takes its codes as they are."""

    def __init__(self, block: Fp8BlockQuant, *, keep_fp8: bool) -> None:
        self.block, self.keep_fp8 = block, keep_fp8
        self.scales: dict[str, BlockScale] = {}
        self._raw: dict[str, RawBytes] = {}
        self._sides: dict[str, Sides] = {}

    def keep_scale(self, tensor: StoredTensor, raw: RawBytes) -> None:
        """Keep a table of FP8 block scales."""
        table = to_float32(raw, tensor.dtype).reshape(tensor.matrix_shape).copy()
        _check(tensor, np.isfinite(table).all())
        self.scales[tensor.name] = BlockScale(table, self.block)

    def keep_side(self, tensor: StoredTensor, raw: RawBytes) -> None:
        """Keep a side table of a packed weight."""
        self._raw[tensor.name] = raw.copy()

    def rows(self, item: PlannedTensor, piece: Piece, raw: RawBytes) -> Rows:
        """The rows of a piece, in the model's order."""
        tensor = item.tensor
        if item.packed is not None:
            return self._packed(item.packed, tensor, piece, raw)
        shape = (piece.rows, tensor.matrix_shape[1])
        if item.scale is not None:
            scale, bytes_of = self.scales[item.scale.name], raw.reshape(shape)
            rows = fp8_codes(bytes_of, piece.row, scale) if self.keep_fp8 else None
            return dequantize_rows(bytes_of, piece.row, scale) if rows is None else rows
        if tensor.dtype == "BF16":
            return _unpair(raw.view("<u2").reshape(shape), tensor)
        if tensor.dtype in PLAIN_DTYPES:
            return _unpair(to_float32(raw, tensor.dtype).reshape(shape), tensor)
        if tensor.dtype in DECODERS:
            codes = decode(raw, tensor.dtype, piece.rows)
            _check(tensor, codes.is_finite)
            return codes if not tensor.pair_rows else codes[paired_order(piece.rows, tensor.pair_rows)]
        values = expand(raw, tensor.dtype, piece.rows)
        _check(tensor, np.isfinite(values).all())
        return _unpair(values, tensor)

    def drop(self, item: PlannedTensor) -> None:
        """Let the tables of a weight go."""
        if item.scale is not None:
            del self.scales[item.scale.name]
        if item.packed is not None:
            self._sides.pop(item.tensor.name, None)
            for side in item.packed.sides:
                self._raw.pop(side.name, None)

    def _packed(self, packed: Packed, tensor: StoredTensor, piece: Piece, raw: RawBytes) -> CodeRows | FloatArray:
        if tensor.name not in self._sides:
            self._sides[tensor.name] = self._tables(packed)
        sides = self._sides[tensor.name]
        rows, cols = packed.shape
        first, count = (0, rows) if packed.must_be_whole else (piece.row, piece.rows)
        return decode_packed(raw, first, (count, cols), packed.stored, sides)

    def _tables(self, packed: Packed) -> Sides:
        scheme, (rows, cols) = packed.stored.scheme, packed.shape
        scales = scale_table(self._raw[packed.scales.name], packed.scales.dtype, rows, scheme)
        if packed.divisor is not None:
            scales = (scales / to_float32(self._raw[packed.divisor.name], packed.divisor.dtype) / 2).astype(np.float32)
        _check(packed.scales, np.isfinite(scales).all())
        if packed.order is not None:
            order = self._raw[packed.order.name].view("<i4")
            if not np.array_equal(order, np.arange(cols) // (cols // scales.shape[1])):
                where = f"{packed.order.path.name}: {packed.order.name!r}"
                raise LoadError(f"{where} puts the inputs in another order, which is not supported")
        zeros = packed.zeros
        if zeros is None:
            return Sides(scales)
        return Sides(scales, zero_table(self._raw[zeros.name], rows, scales.shape[1], scheme))


def _check(tensor: StoredTensor, is_finite: object) -> None:
    if not is_finite:
        raise LoadError(f"{tensor.path.name}: tensor {tensor.name!r} holds NaN or infinity: damaged checkpoint")


def paired_order(rows: int, run: int) -> NDArray[np.intp]:
    """Where each row of runs of interleaved halves is stored; see `StoredTensor.pair_rows`."""
    return np.arange(rows).reshape(-1, run // 2, 2).swapaxes(1, 2).reshape(-1)


def _unpair(values: NDArray[_T], tensor: StoredTensor) -> NDArray[_T]:
    """Rows (or a vector's values) in the model's order."""
    run = tensor.pair_rows
    if not run:
        return values
    if len(tensor.shape) == 1:
        return values[:, paired_order(values.shape[1], run)]
    return values[paired_order(len(values), run)]
