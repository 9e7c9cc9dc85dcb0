"""ep_skew.py: the router is as skewed as asked, rows are conserved under every placement, the table is printed."""

from __future__ import annotations

import io

import numpy as np
import pytest
from balancer_inputs import assignments
from ep_skew import Bench, Equal, Shape, fitted_bias, make_banks, measure_skew, run_step, variants
from rich.console import Console

from coterie.comm.slots import SlotTable
from coterie.kernels.native import NativeKernels
from coterie.spec.placement import ExpertPlacement

SMALL = Shape(ranks=4, experts=16, top_k=4, hidden=64, inner=32, layers=1, redundant=8, tokens=16)


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0])
def test_the_router_chooses_by_zipfs_law(skew: float) -> None:
    bias = fitted_bias(skew, SMALL)
    rng = np.random.default_rng(3)
    scores = 1 / (1 + np.exp(-rng.standard_normal((20_000, SMALL.experts)))) + bias
    chosen = np.argsort(-scores, 1)[:, : SMALL.top_k]
    share = np.bincount(chosen.reshape(-1), minlength=SMALL.experts) / len(scores)
    wanted = assignments(np.arange(1.0, SMALL.experts + 1)[None] ** -skew, 1, SMALL.top_k)[0]
    np.testing.assert_allclose(share, wanted, rtol=0.15)


def test_every_row_is_computed_once_and_split_levels_ranks() -> None:
    kernels = NativeKernels(1)
    bench = Bench(SMALL, 1.0, kernels, make_banks(SMALL, kernels))
    found = variants(bench)
    run_step(found, bench, 9)
    for variant in found.values():
        assert sum(experts.rows for experts in variant.experts) == SMALL.ranks * SMALL.tokens * SMALL.top_k
    gamma = {name: variant.gamma[0] for name, variant in found.items()}
    assert gamma["copies placed, split"] < min(gamma["in order"], gamma["copies placed, equal"])
    assert gamma["copies placed, split"] < 1.05


def test_an_equal_division_is_equal() -> None:
    placement = ExpertPlacement.linear(1, 4, 2, num_slots=6)
    table = SlotTable(placement, 0)
    counts = np.array([5, 8, 1, 0])
    slots = Equal(table).whole(counts)
    for expert, count in enumerate(counts):
        own = slots[placement.slot_to_expert[0] == expert]
        assert own.sum() == count and own.max() - own.min() <= 1


def test_a_run_prints_a_row_for_each_variant() -> None:
    out = io.StringIO()
    measure_skew(SMALL, [0.0, 1.0], 1, Console(file=out, width=150))
    assert out.getvalue().count("copies placed, split") == 2
