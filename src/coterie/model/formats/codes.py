"""CodeRows: rows of a quantised matrix as codes with group scales, the form that readers give and kernels take.

What codes mean is `spec/weights.WeightFormat`'s matter; here is which format holds which others without loss, so that
tensors of different types can share a bank. Reading bytes of a format is the neighbours' work, packing the kernels'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.quantize import dequantize
from coterie.spec.weights import WeightFormat

FloatArray = NDArray[np.float32]
CodeArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Rows [n, cols] as unsigned codes with scales [n, groups] and, for affine kinds, mins [n, groups]."""

    form: WeightFormat
    codes: CodeArray
    scales: FloatArray
    mins: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> CodeRows:
        """Some of the rows, or all in another order."""
        mins = None if self.mins is None else self.mins[rows]
        return CodeRows(self.form, self.codes[rows], self.scales[rows], mins)

    @property
    def is_finite(self) -> bool:
        """Whether no scale or min is NaN or infinite."""
        return bool(np.isfinite(self.scales).all() and (self.mins is None or np.isfinite(self.mins).all()))

    def values(self) -> FloatArray:
        """The weights in float32."""
        with np.errstate(invalid="ignore", over="ignore"):
            return dequantize(self.form, self.codes, self.scales, self.mins)


def holds(target: WeightFormat, form: WeightFormat) -> bool:
    """Whether every matrix of `form` is one of `target`, value for value."""
    if form.is_affine:
        kinds = target.kind == form.kind or target.kind == "affine8"
    elif form.kind == "code4":
        kinds = target.kind == "int8" or (target.kind == "code4" and target.table == form.table)
    else:
        kinds = target.kind == form.kind
    groups = target.group == form.group or (target.group > 0 and form.group % target.group == 0 and form.group > 0)
    return kinds and groups and (target.scale in (form.scale, "f32"))


def common_format(forms: set[WeightFormat]) -> WeightFormat | None:
    """The narrowest format that holds all of `forms`; None if there is none (symmetric and affine ones mixed)."""
    if not forms:
        return None
    group = min(form.group for form in forms)
    scales = {form.scale for form in forms}
    scale = scales.pop() if len(scales) == 1 else "f32"
    first = next(iter(forms))
    options = (
        WeightFormat(first.kind, group, scale, first.table),
        WeightFormat("int8", group, scale),
        WeightFormat("affine8", group, scale),
    )
    return next((option for option in options if all(holds(option, form) for form in forms)), None)


def convert(rows: CodeRows, target: WeightFormat) -> CodeRows:
    """The same weights in a format that holds them."""
    form, codes, scales, mins = rows.form, rows.codes, rows.scales, rows.mins
    if form.group != target.group:
        times = form.group // target.group
        scales = np.repeat(scales, times, axis=1)
        mins = None if mins is None else np.repeat(mins, times, axis=1)
    if form.kind == "code4" and target.kind == "int8":
        codes = (np.asarray(form.table, np.int16) + 128).astype(np.uint8).take(codes)
    return CodeRows(target, codes, scales, mins)
