"""quantize and dequantize: what codes and scales mean, in numpy. The oracle of the packed formats, clear before fast.

`dequantize` defines the value of every scaled format. `quantize` follows the native kernels' rule (scale first, rounded
to its stored type, then codes): float32 arithmetic in the same order, so the two agree up to ties.
Arrays: values [n, cols] float32, codes [n, cols] uint8, scales and mins [n, groups] float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.spec.weights import WeightFormat

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

_STEPS = 7


def _e4m3_values() -> Floats:
    """The 256 values of float8 e4m3fn: bias 7, no infinities, 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()
E4M3_VALUES.setflags(write=False)


def dequantize(format: WeightFormat, codes: Codes, scales: Floats, mins: Floats | None = None) -> Floats:
    """float32 values of codes: the definition of each scaled format."""
    group = format.group or codes.shape[1]
    spread = np.repeat(scales, group, 1)[:, : codes.shape[1]]
    if format.kind == "fp8":
        return spread * E4M3_VALUES[codes]
    if format.kind == "int8":
        return spread * (codes.astype(np.float32) - 128)
    if format.kind == "code4":
        return spread * np.array(format.table, np.float32)[codes]
    assert mins is not None, "affine codes need mins"
    return spread * codes.astype(np.float32) - np.repeat(mins, group, 1)[:, : codes.shape[1]]


def quantize(format: WeightFormat, values: Floats) -> tuple[Codes, Floats, Floats | None]:
    """(codes, scales, mins) of float rows; mins only for affine kinds."""
    group = format.group or values.shape[1]
    starts = range(0, values.shape[1], group)
    parts = [_quantize_group(format, values[:, start : start + group]) for start in starts]
    codes = np.concatenate([part[0] for part in parts], 1)
    scales = np.stack([part[1] for part in parts], 1)
    mins = np.stack([part[2] for part in parts], 1) if format.is_affine else None
    return codes, scales, mins


def _quantize_group(format: WeightFormat, x: Floats) -> tuple[Codes, Floats, Floats]:
    """One group of every row: codes [n, size], scale [n], min [n]."""
    top = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    bad = np.logical_not(np.isfinite(x).all(axis=1, keepdims=True))[:, 0]
    x, top = np.where(bad[:, None], np.float32(0), x), np.where(bad, np.float32(0), top)
    mins = np.zeros_like(top)
    if format.kind == "int8":
        scales = _stored(format, (np.abs(top) / np.float32(127)).astype(np.float32))
        codes = np.clip(np.rint(x * _inverse(scales)[:, None]), -127, 127) + 128
    elif format.kind == "fp8":
        scales = _stored(format, (np.abs(top) / np.float32(448)).astype(np.float32))
        codes = _nearest_e4m3(x * _inverse(scales)[:, None])
    elif format.kind == "code4":
        scales = _table_scales(format, x, top)
        codes = _nearest(np.array(format.table, np.float32), x * _inverse(scales)[:, None])
    else:
        most = np.float32(15 if format.kind == "affine4" else 255)
        mins = _stored(format, -x.min(1))
        scales = _stored(format, (x.max(1) + mins) / most)
        codes = np.clip(np.rint((x + mins[:, None]) * _inverse(scales)[:, None]), 0, most)
    codes[bad] = 1
    return codes.astype(np.uint8), np.where(bad, np.float32(np.nan), scales), mins


def _stored(format: WeightFormat, scales: Floats) -> Floats:
    if format.scale == "f16":
        return scales.astype(np.float16).astype(np.float32)
    if format.scale == "bf16":
        bits = scales.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
    return scales


def _inverse(scales: Floats) -> Floats:
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


def _nearest(table: Floats, x: Floats) -> NDArray[np.integer]:
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    index: NDArray[np.integer] = order[(x[..., None] > middles).sum(-1)]
    return index


def _nearest_e4m3(x: Floats) -> NDArray[np.integer]:
    positive = E4M3_VALUES[:127]
    magnitude = np.minimum(np.abs(x), 448)
    above = np.clip(np.searchsorted(positive, magnitude), 1, 126)
    below_gap, above_gap = magnitude - positive[above - 1], positive[above] - magnitude
    up = (above_gap < below_gap) | ((above_gap == below_gap) & (above % 2 == 0))
    codes: NDArray[np.integer] = np.where(up, above, above - 1) + np.where(x < 0, 128, 0)
    return codes


def _table_scales(format: WeightFormat, x: Floats, top: Floats) -> Floats:
    table = np.sort(np.array(format.table, np.float32))
    extreme = table[0] if -table[0] >= table[-1] else table[-1]
    if format.scale == "e8m0":
        ratio = np.abs(top / extreme)
        exponent = (ratio.view(np.uint32) >> 23).astype(int) - 127
        options = [np.ldexp(np.float32(1), np.clip(exponent + step, -126, 127)).astype(np.float32) for step in (0, 1)]
        errors = [((x - s[:, None] * table[_nearest(table, x / s[:, None])]) ** 2).sum(1) for s in options]
        chosen = np.where(errors[1] < errors[0], options[1], options[0])
        return np.where(top == 0, np.float32(1), chosen)
    best, scales = np.full(len(x), -1, np.float32), np.zeros(len(x), np.float32)
    for step in range(_STEPS):
        inverse = extreme * (np.float32(0.86) + np.float32(0.04) * np.float32(step)) * _inverse(top)
        q = table[_nearest(table, x * inverse[:, None])]
        num, den = (x * q).sum(1), (q * q).sum(1)
        gain = np.divide(num * num, den, out=np.zeros_like(num), where=den > 0)
        better = gain > best
        fitted = np.divide(num, den, out=np.zeros_like(num), where=den > 0)
        best, scales = np.where(better, gain, best), np.where(better, fitted, scales)
    return _stored(format, np.where(top == 0, np.float32(0), scales))
