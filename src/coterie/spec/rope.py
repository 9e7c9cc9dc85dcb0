"""Rotary angles of a RopeSpec, in the arithmetic of the published implementations (float32 frequencies and angles).

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071) as DeepSeek and transformers write it; Llama 3's scaling.
An angle depends on its position only, never on how long a context was allocated.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coterie.spec.model import RopeSpec


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's m(s) = 0.1 s ln(factor) + 1, and 1 when the factor does not stretch."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSpec) -> NDArray[np.float32]:
    """Radians per position of each rotated pair: [dim/2]."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    base = (np.float32(1.0) / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    if rope.scaling == "linear":
        return (base / np.float32(rope.factor)).astype(np.float32)
    if rope.scaling == "yarn":
        return _yarn(rope, base)
    if rope.scaling == "llama3":
        return _llama3(rope, base)
    return base


def cos_sin(rope: RopeSpec, max_positions: int) -> NDArray[np.float32]:
    """cos and sin of positions 0 .. max_positions-1, times `attention_factor`: float32 [max_positions, 2, dim/2]."""
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * inverse_frequencies(rope)[None, :]
    wide = angles.astype(np.float64)
    table = np.stack([np.cos(wide), np.sin(wide)], axis=1) * rope.attention_factor
    return table.astype(np.float32)


def _yarn(rope: RopeSpec, base: NDArray[np.float32]) -> NDArray[np.float32]:
    def correction_dim(rotations: float) -> float:
        return rope.dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    stretched = base / np.float32(rope.factor)
    return (stretched * (1 - keep) + base * keep).astype(np.float32)


def _llama3(rope: RopeSpec, base: NDArray[np.float32]) -> NDArray[np.float32]:
    wavelength = 2 * math.pi / base
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    slow = np.where(wavelength > low_wavelength, base / np.float32(rope.factor), base)
    turns = rope.original_max_positions / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - smooth) * slow / np.float32(rope.factor) + smooth * slow
    medium = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return np.where(medium, mixed, slow).astype(np.float32)
