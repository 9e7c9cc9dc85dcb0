"""split: whole tokens that sum to the counts, and a busiest rank that no division of the tokens could spare more.

The oracle is a certificate: whatever is held only by a set of ranks must be computed by it, so its load divided by its
size bounds the busiest rank of every division. Where a division reaches the bound, it solves the linear programme.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.spec.balance import balance
from coterie.spec.errors import SpecError
from coterie.spec.placement import ExpertPlacement
from coterie.spec.split import LayerSplit, SplitPlan, split


def random_placement(rng: np.random.Generator, layers: int, experts: int, ranks: int, per_rank: int) -> ExpertPlacement:
    """Any legal table: every expert once, then copies wherever they may lie."""
    rows = []
    for _ in range(layers):
        table = ExpertPlacement.linear(1, experts, ranks, num_slots=ranks * per_rank).slot_to_expert[0]
        rows.append(rng.permutation(experts)[table].reshape(ranks, per_rank)[rng.permutation(ranks)].ravel())
    return ExpertPlacement(np.stack(rows), experts, ranks)


def lower_bound(row: np.ndarray, load: np.ndarray, ranks: int, levels: np.ndarray) -> float:
    """The certificate of the sets of ranks that are the highest n of `levels`."""
    order = np.argsort(-levels, kind="stable")
    position = np.empty(ranks, int)
    position[order] = np.arange(ranks)
    last = np.zeros(len(load), int)
    np.maximum.at(last, row, position[np.arange(len(row)) // (len(row) // ranks)])
    return float((np.cumsum(np.bincount(last, load, ranks)) / np.arange(1, ranks + 1)).max())


@settings(max_examples=80)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 12), st.integers(1, 6), st.data())
def test_shares_are_whole_and_sum_to_the_counts(
    seed: int, layers: int, experts: int, ranks: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    per_rank = data.draw(st.integers(-(-experts // ranks), experts))
    placement = random_placement(rng, layers, experts, ranks, per_rank)
    counts = rng.integers(0, data.draw(st.sampled_from([1, 2, 5, 1000])), (layers, experts))
    speeds = None if rng.random() < 0.5 else rng.uniform(0.2, 2, ranks)
    expected = None if rng.random() < 0.5 else rng.integers(0, 9, (layers, experts)).astype(float)
    shares = split(counts, placement, expected=expected, speeds=speeds)
    assert shares.dtype == np.int64
    for layer in range(layers):
        given_load = None if expected is None else expected[layer]
        one = LayerSplit(placement, layer, expected=given_load, speeds=speeds).whole(counts[layer])
        for row in (shares[layer], one):
            assert (row >= 0).all()
            got = np.bincount(placement.slot_to_expert[layer], row, experts)
            assert got.tolist() == counts[layer].tolist()
    assert (shares == split(counts, placement, expected=expected, speeds=speeds)).all()


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.integers(2, 16), st.integers(2, 6), st.integers(0, 3))
def test_many_sweeps_reach_the_exact_optimum(seed: int, experts: int, ranks: int, extra: int) -> None:
    rng = np.random.default_rng(seed)
    per_rank = min(-(-experts // ranks) + extra, experts)
    placement = random_placement(rng, 1, experts, ranks, per_rank)
    load = rng.exponential(100, (1, experts))
    plan = SplitPlan.of(placement.slot_to_expert, experts, ranks)
    levels = plan.level(load, 400).reshape(ranks, -1).sum(1)
    bound = lower_bound(placement.slot_to_expert[0], load[0], ranks, levels)
    assert bound <= levels.max() * (1 + 1e-9)
    assert levels.max() <= bound * 1.002
    usual = plan.level(load).reshape(ranks, -1).sum(1)
    assert usual.max() <= bound * 1.06


def test_a_chain_of_copies_is_levelled_and_whole_tokens_cost_little() -> None:
    """Rank r shares an expert with rank r + 1: load flows along the whole line."""
    ranks = 6
    table = np.stack([np.arange(ranks) + 1, np.arange(ranks)], 1).reshape(1, -1)
    placement = ExpertPlacement(table, ranks + 1, ranks)
    counts = np.array([[600, 0, 0, 0, 0, 0, 0]])
    assert split(counts, placement)[0, 1] == 600, "a single copy has no choice"
    counts = np.array([[0, 100, 100, 100, 100, 100, 0]])
    by_rank = split(counts, placement).reshape(ranks, 2).sum(1)
    assert by_rank.sum() == 500
    assert by_rank.max() <= 500 / ranks * 1.1
    patient = SplitPlan.of(placement.slot_to_expert, ranks + 1, ranks).whole(counts, 60).reshape(ranks, 2).sum(1)
    assert patient.max() <= 85


def test_a_slow_rank_gets_less_and_none_without_a_copy() -> None:
    placement = ExpertPlacement.linear(1, 8, 4, num_slots=16)
    counts = np.full((1, 8), 100)
    even = split(counts, placement).reshape(4, 4).sum(1)
    slow = split(counts, placement, speeds=np.array([0.25, 1, 1, 1])).reshape(4, 4).sum(1)
    assert even.max() - even.min() <= 2
    assert slow.sum() == 800
    assert slow[0] < 0.5 * even[0]
    one = LayerSplit(placement, 0, speeds=np.array([0.25, 1, 1, 1])).whole(counts[0]).reshape(4, 4).sum(1)
    assert np.abs(one - slow).max() <= 2


def test_without_copies_there_is_nothing_to_split() -> None:
    placement = ExpertPlacement.linear(2, 8, 4)
    counts = np.arange(16).reshape(2, 8)
    assert split(counts, placement).tolist() == counts.tolist()
    assert LayerSplit(placement, 1).whole(counts[1]).tolist() == counts[1].tolist()


def test_empty_slots_get_nothing() -> None:
    placement = ExpertPlacement(np.array([[0, 1, -1, -1, 1, 0]]), 2, 3)
    shares = split(np.array([[10, 20]]), placement)[0]
    assert shares[[2, 3]].tolist() == [0, 0]
    assert shares.sum() == 30


@pytest.mark.parametrize(
    ("counts", "speeds", "message"),
    [
        (np.zeros((1, 7), int), None, r"integers \[1, 8\], not int64 \[1, 7\]"),
        (np.zeros((1, 8)), None, "not float64"),
        (np.full((1, 8), -1), None, "negative"),
        (np.zeros((1, 8), int), np.ones(3), "4 positive numbers"),
        (np.zeros((1, 8), int), np.array([1, 0, 1, 1]), "4 positive numbers"),
    ],
)
def test_refusals(counts: np.ndarray, speeds: np.ndarray | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        split(counts, ExpertPlacement.linear(1, 8, 4), speeds=speeds)


def test_balance_is_over_ranks() -> None:
    """[[100, 200], [100, 200]] by rank is 0.75 in each layer, not 1.0 (the wrong axis)."""
    assert balance(np.array([[100, 200], [100, 200]]), 2).tolist() == [0.75, 0.75]
    assert balance(np.zeros((1, 4)), 2).tolist() == [1.0]
