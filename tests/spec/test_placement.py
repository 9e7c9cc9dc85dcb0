"""ExpertPlacement: the linear table, its lookups against brute force, and every refusal with what would be valid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.spec.errors import SpecError
from coterie.spec.placement import ExpertPlacement, check_slots, smallest_slots


def test_linear_without_redundant_slots_is_the_contiguous_layout() -> None:
    placement = ExpertPlacement.linear(3, 16, 4, 2)
    assert placement.slot_to_expert.tolist() == [list(range(16))] * 3
    assert placement.slots_per_rank == 4
    assert placement.rank_of_slot.tolist() == [slot // 4 for slot in range(16)]
    assert placement.node_of_rank.tolist() == [0, 0, 1, 1]
    assert placement.copies(2).tolist() == [[expert] for expert in range(16)]
    assert placement.slot_to_expert[:, placement.slots_of_rank(1)].tolist() == [[4, 5, 6, 7]] * 3


def test_linear_takes_the_smallest_number_of_slots_by_default() -> None:
    placement = ExpertPlacement.linear(1, 6, 4)
    assert placement.num_slots == 8
    assert placement.slot_to_expert[0, :6].tolist() == list(range(6))


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 24), st.integers(1, 9), st.data())
def test_linear_is_legal_for_every_number_of_slots(layers: int, experts: int, ranks: int, data: st.DataObject) -> None:
    least = smallest_slots(experts, ranks)
    slots = data.draw(st.integers(least // ranks, experts)) * ranks
    placement = ExpertPlacement.linear(layers, experts, ranks, num_slots=slots)
    assert placement.slot_to_expert.shape == (layers, slots)
    assert placement.slot_to_expert[0, :experts].tolist() == list(range(experts))
    copies = placement.num_copies()
    assert copies.sum() == layers * slots
    row = placement.slot_to_expert[0]
    table = placement.copies(0)
    for expert in range(experts):
        holding = np.flatnonzero(row == expert)
        assert table[expert][: len(holding)].tolist() == holding.tolist()
        assert (table[expert][len(holding) :] == -1).all()
        assert len(set(placement.rank_of_slot[holding])) == len(holding) == copies[0, expert]
    assert table.shape[1] == copies.max()
    assert placement.digest() == ExpertPlacement.linear(layers, experts, ranks, num_slots=slots).digest()


def test_the_digest_sees_every_difference() -> None:
    base = ExpertPlacement.linear(2, 8, 4, 2)
    swapped = base.slot_to_expert.copy()
    swapped[1, [0, 7]] = swapped[1, [7, 0]]
    others = [
        ExpertPlacement(swapped, 8, 4, 2),
        ExpertPlacement.linear(1, 8, 4, 2),
        ExpertPlacement.linear(2, 8, 4, 1),
        ExpertPlacement.linear(2, 8, 2, 2),
        ExpertPlacement(base.slot_to_expert, 8, 4, 2, (1, 3)),
    ]
    digests = [base.digest(), *(other.digest() for other in others)]
    assert len(set(digests)) == len(digests)
    assert ExpertPlacement(base.slot_to_expert.astype(np.int64), 8, 4, 2).digest() == base.digest()


def test_the_table_is_a_read_only_copy() -> None:
    table = np.arange(8, dtype=np.int32)[None]
    placement = ExpertPlacement(table, 8, 2)
    table[0, 0] = 7
    assert placement.slot_to_expert[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        placement.slot_to_expert[0, 0] = 1


def test_empty_slots_and_unequal_nodes_are_legal() -> None:
    placement = ExpertPlacement(np.array([[0, 1, 2, 3, -1, -1]]), 4, 3, 2, (2, 1))
    assert placement.node_of_rank.tolist() == [0, 0, 1]
    assert placement.copies(0).tolist() == [[0], [1], [2], [3]]
    assert placement.num_copies().tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("table", "experts", "ranks", "nodes", "message"),
    [
        ([[0, 1, 2]], 3, 2, 1, r"3 slots .* multiple of 2 from 4 to 6 .* 4, 6 \(1, 3 redundant\)"),
        ([[0, 1, 2, 4]], 4, 2, 1, "expert 4; valid are 0 to 3, and -1"),
        ([[0, 1, 2, -2]], 4, 2, 1, "expert -2; valid are 0 to 3"),
        ([[0, 1, 2, 2]], 4, 4, 1, "no slot of layer 0 holds expert 3"),
        ([[0, 1, 2, 3], [0, 1, -1, -1]], 4, 2, 1, r"layer 1 holds expert 2 \(2 .*pairs"),
        ([[0, 0, 1, 2]], 3, 2, 1, "rank 0 holds expert 0 of layer 0 twice"),
        ([0, 1], 2, 1, 1, "integers"),
        ([[0.0, 1.0]], 2, 1, 1, "integers"),
        ([[0, 1, 2, 3]], 4, 4, 3, "valid numbers of nodes: 1, 2, 4"),
        ([[0, 1]], 2, 0, 1, "at least 1"),
    ],
)
def test_refusals_state_what_is_valid(table: list, experts: int, ranks: int, nodes: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ExpertPlacement(np.array(table), experts, ranks, nodes)


@pytest.mark.parametrize("slots", [0, 255, 256 + 16, 256 * 32 + 32])
def test_slot_counts_near_the_asked_one_are_valid(slots: int) -> None:
    with pytest.raises(SpecError, match="valid ones near it: ") as caught:
        check_slots(slots, 256, 32)
    near = str(caught.value).split("valid ones near it: ")[1].split(" (")[0]
    for number in near.split(", "):
        check_slots(int(number), 256, 32)


def test_unequal_nodes_must_add_up() -> None:
    with pytest.raises(SpecError, match=r"2 numbers from 1 that sum to 4"):
        ExpertPlacement(np.arange(4)[None], 4, 4, 2, (1, 2))
