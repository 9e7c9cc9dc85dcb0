"""Auxiliary-loss-free load balancing (arXiv 2408.15664, DeepSeek-V3 section 2.1.2): a bias that only selects.

Once per optimiser step, b_i += speed * sign(mean(c) - c_i) with exact integer counts c_i of the step's real tokens. The
sign is of an integer, so it cannot be flipped by rounding. Counts come from the training forwards only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def update_bias(bias: Tensor, counts: NDArray[np.int64], speed: float) -> None:
    """Move one layer's correction bias [E] in place towards equal counts [E]."""
    total = int(counts.sum())
    direction = np.sign(total - len(counts) * counts)
    bias += torch.from_numpy((direction * speed).astype(np.float32))


def violation(counts: NDArray[np.int64]) -> float:
    """MaxVio: how much more than the mean the busiest expert of any layer gets; counts [layers, E]. 0 is balance."""
    return float((counts.max(1) / np.maximum(counts.mean(1), 1e-9)).max() - 1)
