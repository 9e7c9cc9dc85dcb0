"""The forms of an exchange between real processes: the bits of one rank."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "moe"))

from forms_work import SIZES, run_forms
from moe_ranks import make_layer, stages, tokens
from rank_processes import run_ranks

from coterie.comm.exchange import FormPolicy
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive

EXACT = [FormPolicy(), FormPolicy(capacity=9), FormPolicy("hierarchical", capacity=1), FormPolicy("hierarchical"),
         FormPolicy(piece_bytes=1), FormPolicy("hierarchical", piece_bytes=1)]  # fmt: skip
REDUCED = [FormPolicy("flat-reduced"), FormPolicy("hierarchical-reduced")]


@pytest.mark.parametrize(("size", "copies"), [(2, True), (4, False), (4, True)])
def test_processes_equal_one_rank(size: int, copies: bool) -> None:
    ranks = run_ranks(size, run_forms, EXACT + REDUCED, copies)
    kernels = NativeKernels()
    alone = make_layer(kernels, None, None)
    for batch, sizes in enumerate(SIZES[size]):
        want = drive(stages(kernels, alone, tokens(sum(sizes), size)))
        for form, policy in enumerate(EXACT + REDUCED):
            got = np.concatenate([outputs[form][batch] for outputs in ranks])
            if policy.exact:
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, atol=1e-5)
