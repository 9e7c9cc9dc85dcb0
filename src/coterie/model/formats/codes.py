"""Codes: rows of a quantised matrix as integers with group scales, the form that every reader gives and kernels take.

`WeightKind` says how a code becomes a weight:
  int8             w = scale * (code - 128)
  code4            w = scale * table[code], a table of 16 small integers
  affine4, affine8 w = scale * code - min
One scale (and min) serves `group` neighbouring inputs of a row, or the whole row when `group` is 0. Nothing here reads
bytes of a format (its neighbours do) or packs for a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
CodeArray = NDArray[np.uint8]
ScaleType = Literal["f32", "f16", "bf16", "e8m0"]
CodeKind = Literal["int8", "code4", "affine4", "affine8"]

INT4_TABLE = tuple(range(-8, 8))
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1, so that all are integers; the scale is halved."""
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How codes become weights. `scale`: the narrowest type that holds every scale and min exactly."""

    kind: CodeKind
    group: int
    scale: ScaleType = "f32"
    table: tuple[int, ...] = ()

    @property
    def is_symmetric(self) -> bool:
        return self.kind in ("int8", "code4")


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows [n, cols] as unsigned codes with scales [n, groups] and, for affine kinds, mins [n, groups]."""

    codes: CodeArray
    scales: FloatArray
    mins: FloatArray | None = None

    def take(self, rows: slice | NDArray[np.intp]) -> Codes:
        """Some of the rows."""
        return Codes(self.codes[rows], self.scales[rows], None if self.mins is None else self.mins[rows])

    @property
    def is_finite(self) -> bool:
        """Whether no scale or min is NaN or infinite."""
        return bool(np.isfinite(self.scales).all() and (self.mins is None or np.isfinite(self.mins).all()))


def dequantize(codes: Codes, form: CodeFormat) -> FloatArray:
    """The weights [n, cols] in float32: one product, and one difference for affine kinds, each rounded once."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _dequantize(codes, form)


def _dequantize(codes: Codes, form: CodeFormat) -> FloatArray:
    rows, cols = codes.codes.shape
    width = form.group or cols
    if form.kind == "code4":
        values = np.asarray(form.table, np.float32).take(codes.codes)
    else:
        values = codes.codes.astype(np.float32)
        if form.kind == "int8":
            values -= 128
    groups = codes.scales.shape[1]
    if groups * width == cols:
        values = values.reshape(rows, groups, width)
        values *= codes.scales[:, :, None]
        if codes.mins is not None:
            values -= codes.mins[:, :, None]
        return values.reshape(rows, cols)
    values *= np.repeat(codes.scales, width, axis=1)[:, :cols]
    if codes.mins is not None:
        values -= np.repeat(codes.mins, width, axis=1)[:, :cols]
    return values


def common_format(forms: set[CodeFormat]) -> CodeFormat | None:
    """A format that holds every one of `forms` exactly, so that tensors of different types can share a bank.

    Symmetric ones meet in int8, affine ones in affine8, at the smallest group; None if the two sorts are mixed, or a
    group does not divide another.
    """
    if len(forms) == 1:
        return next(iter(forms))
    groups = {form.group for form in forms}
    least = min(groups)
    symmetric = {form.is_symmetric for form in forms}
    if not forms or len(symmetric) > 1 or (least == 0 and len(groups) > 1):
        return None
    if any(group % least for group in groups if least):
        return None
    scales = {form.scale for form in forms}
    scale = scales.pop() if len(scales) == 1 else "f32"
    kinds = {form.kind for form in forms}
    tables = {form.table for form in forms}
    if len(kinds) == 1 and len(tables) == 1:
        return CodeFormat(kinds.pop(), least, scale, tables.pop())
    return CodeFormat("int8" if symmetric.pop() else "affine8", least, scale)


def convert(codes: Codes, form: CodeFormat, target: CodeFormat) -> Codes:
    """The same weights in a wider format of `common_format`."""
    if form.group != target.group:
        times = form.group // target.group
        mins = None if codes.mins is None else np.repeat(codes.mins, times, axis=1)
        codes = Codes(codes.codes, np.repeat(codes.scales, times, axis=1), mins)
    if form.kind == "code4" and target.kind == "int8":
        bytes_of = (np.asarray(form.table, np.int16) + 128).astype(np.uint8)
        codes = replace(codes, codes=bytes_of.take(codes.codes))
    return codes
