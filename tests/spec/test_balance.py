"""place: legal for every shape, deterministic, within its budget, and zero moves where nothing is to be gained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.spec.balance import Room, balance, held, moves, place
from coterie.spec.errors import SpecError
from coterie.spec.placement import ExpertPlacement
from coterie.spec.split import SplitPlan

LOADS = ("even", "skewed", "zero", "one", "ties")


def some_load(kind: str, layers: int, experts: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "even":
        return np.ones((layers, experts))
    if kind == "zero":
        return np.zeros((layers, experts))
    if kind == "one":
        return np.eye(experts)[rng.integers(experts, size=layers)]
    if kind == "ties":
        return rng.integers(0, 3, (layers, experts)).astype(float)
    return np.exp(rng.normal(0, 1.2, (layers, experts)))


def levels(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    plan = SplitPlan.of(placement.slot_to_expert, placement.num_experts, placement.num_ranks)
    return balance(plan.level(load, 30), placement.num_ranks)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from(LOADS), st.integers(1, 3), st.integers(1, 24), st.data())
def test_every_shape_gives_a_legal_placement(
    seed: int, kind: str, layers: int, experts: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    ranks = sum(sizes)
    slots = ranks * data.draw(st.integers(-(-experts // ranks), experts))
    groups = data.draw(st.sampled_from([1, 2, 3, 4]))
    load = some_load(kind, layers, experts, rng)
    nodes = len(sizes) if len(set(sizes)) == 1 else sizes
    room = Room(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups)
    first, again = place(load, room), place(load, room)
    assert first.digest() == again.digest()
    assert first.slot_to_expert.shape == (layers, slots)
    assert first.node_of_rank.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
    assert (first.slot_to_expert >= 0).all(), "no slot is left empty"
    budget = data.draw(st.sampled_from([None, 0, 1, 2, 5]))
    other = some_load("skewed", layers, experts, rng)
    later = place(other, room, current=first, max_moves=budget)
    if budget is not None:
        assert moves(first, later).max() <= budget
    assert (levels(later, other) >= levels(first, other) * 0.999).all()


@settings(max_examples=25)
@given(st.integers(0, 1 << 30), st.sampled_from(LOADS), st.integers(2, 16), st.integers(2, 6), st.data())
def test_dead_ranks_keep_empty_slots_and_no_expert_is_lost(
    seed: int, kind: str, experts: int, ranks: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    per_rank = data.draw(st.integers(-(-experts // ranks), experts))
    dead = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    load = some_load(kind, 2, experts, rng)
    room = Room(num_slots=ranks * per_rank, num_ranks=ranks)
    whole = place(load, room)
    if (ranks - len(dead)) * per_rank < experts:
        missing = experts - (ranks - len(dead)) * per_rank
        with pytest.raises(SpecError, match=f"{missing} slots are missing"):
            place(load, room, dead=dead)
        return
    gone = np.isin(whole.rank_of_slot, sorted(dead))
    for current in (None, whole):
        rest = place(load, room, dead=dead, current=current, max_moves=0)
        assert (rest.slot_to_expert[:, gone] == -1).all()
        assert (rest.slot_to_expert[:, ~gone] >= 0).all()
    lost = ~held(np.where(gone, -1, whole.slot_to_expert), experts, 1)[:, 0]
    assert (moves(whole, rest) == lost.sum(1)).all(), "only what has no copy left is moved"
    back = place(load, room, current=rest)
    assert (back.slot_to_expert >= 0).all(), "a rank that returns is filled again"


def test_a_balanced_load_moves_nothing() -> None:
    rng = np.random.default_rng(3)
    linear = ExpertPlacement.linear(4, 64, 8)
    room = Room(num_slots=64, num_ranks=8, num_nodes=2)
    even = np.full((4, 64), 1000.0)
    assert moves(linear, place(even, room, current=linear)).tolist() == [0] * 4
    noise = even + rng.normal(0, 1, even.shape)
    assert moves(linear, place(noise, room, current=linear)).tolist() == [0] * 4, "less than a percent is not worth it"
    zero = np.zeros((4, 64))
    assert moves(linear, place(zero, room, current=linear)).tolist() == [0] * 4
    hot = even.copy()
    hot[2, :8] = 3000
    changed = place(hot, room, current=linear, max_moves=6)
    got = moves(linear, changed)
    assert 0 < got[2] <= 6
    assert got[[0, 1, 3]].tolist() == [0, 0, 0]
    assert (changed.slot_to_expert[[0, 1, 3]] == linear.slot_to_expert[[0, 1, 3]]).all()
    assert levels(changed, hot)[2] > levels(linear, hot)[2] + 0.1


def test_a_move_is_an_expert_that_a_rank_must_receive() -> None:
    before = ExpertPlacement(np.array([[0, 1, 2, 3]]), 4, 2)
    assert moves(before, ExpertPlacement(np.array([[1, 0, 3, 2]]), 4, 2)).tolist() == [0]
    assert moves(before, ExpertPlacement(np.array([[2, 1, 0, 3]]), 4, 2)).tolist() == [2]


def test_groups_stay_on_nodes_where_the_load_allows_it() -> None:
    rng = np.random.default_rng(0)
    load = np.exp(rng.normal(0, 0.2, (3, 64)))
    placed = place(load, Room(num_slots=80, num_ranks=16, num_nodes=4, num_groups=8))
    node = placed.node_of_rank[placed.rank_of_slot]
    for row in placed.slot_to_expert:
        at_home = 0
        for group in range(8):
            where = np.bincount(node[row // 8 == group], minlength=4)
            at_home += where.max()
        assert at_home >= 0.75 * 80


ROOM = Room(num_slots=288, num_ranks=32, num_nodes=4)


@pytest.mark.parametrize(
    ("room", "options", "message"),
    [
        (replace(ROOM, num_slots=250), {}, "multiple of 32 from 256 to 8192.* 256, 288"),
        (replace(ROOM, num_slots=8224), {}, "at most one copy of an expert on a rank"),
        (replace(ROOM, num_nodes=5), {}, "valid numbers of nodes: 1, 2, 4, 8, 16, 32"),
        (replace(ROOM, num_nodes=(16, 15)), {}, "sum to 32"),
        (replace(ROOM, num_groups=0), {}, "num_groups must be from 1"),
        (ROOM, {"max_moves": -1}, "max_moves from 0"),
        (ROOM, {"dead": {32}}, "among 0 to 31"),
        (ROOM, {"dead": set(range(4))}, "28 of 32 ranks have 252 slots for 256 experts: 4 slots are missing"),
        (ROOM, {"current": ExpertPlacement.linear(1, 256, 32)}, r"\(1, 256, 256, 32\), not \(2, 256, 288, 32\)"),
    ],
)
def test_refusals(room: Room, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        place(np.ones((2, 256)), room, **options)


@pytest.mark.parametrize("load", [np.ones(4), np.full((1, 4), -1), np.full((1, 4), np.nan), np.ones((0, 4))])
def test_loads_that_are_none(load: np.ndarray) -> None:
    with pytest.raises(SpecError, match="load must be finite numbers"):
        place(load, Room(num_slots=4, num_ranks=2))
