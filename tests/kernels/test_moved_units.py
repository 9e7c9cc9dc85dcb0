"""An expert is one range of bytes in every weight format: copied to another rank's bank, it computes the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import LEVELS, normal
from test_weight_formats import FORMATS, IDS

from coterie.kernels.native import NativeKernels
from coterie.spec.weights import BF16, F32, MatrixSpec, WeightFormat

HIDDEN, INNER = 160, 96


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", [F32, BF16, *FORMATS], ids=["f32", "bf16", *IDS])
def test_a_moved_expert_computes_the_same(format: WeightFormat, isa: str) -> None:
    """Codes, scales and minima of both matrices: what is left out would be zero, or the expert's that was there."""
    kernels = NativeKernels(1, isa)
    up, down = MatrixSpec(2 * INNER, HIDDEN, format, 2), MatrixSpec(HIDDEN, INNER, format)
    theirs, ours = kernels.allocate(3, up, down), kernels.allocate(2, up, down)
    for number, banks in enumerate((theirs, ours)):
        for bank, shape in zip(banks, ((2 * INNER, HIDDEN), (HIDDEN, INNER)), strict=True):
            for index in range(3 - number):
                kernels.fill(bank, index, 0, normal(10 * number + index, *shape, scale=0.1 * (1 + number)))
    x = kernels.from_host(normal(5, 4, HIDDEN))
    alone = kernels.experts(x, np.array([0, 4, 0], np.int32), *theirs)
    before = kernels.experts(x, np.array([4, 0], np.int32), *ours)
    assert not np.array_equal(before, alone)
    kernels.units(ours[0])[0] = kernels.units(theirs[0])[1]
    np.testing.assert_array_equal(kernels.experts(x, np.array([4, 0], np.int32), *ours), alone)
