"""Tables of slots through losses and returns: every expert keeps a slot, and no more is loaded than must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.spec.errors import SpecError
from coterie.spec.placement import EMPTY, ExpertPlacement, count_copies, smallest_slots
from coterie.spec.repair import cover, slots_of, with_again, without


def test_a_copy_takes_over_and_only_orphans_are_loaded() -> None:
    initial = ExpertPlacement.linear(3, 8, 4, num_slots=12).slot_to_expert
    lost = without(initial, 4, 1)
    repaired = cover(lost, 4, [0, 2, 3], 8)
    orphans = count_copies(lost, 8) == 0
    changed = (repaired != lost).sum(1)
    np.testing.assert_array_equal(changed, orphans.sum(1))
    assert (count_copies(repaired, 8) > 0).all()
    ExpertPlacement(slots_of(repaired, 4, [0, 2, 3]), 8, 3)


def test_too_few_slots_say_how_many_are_missing() -> None:
    table = without(ExpertPlacement.linear(2, 32, 4).slot_to_expert, 4, 0)
    with pytest.raises(SpecError, match=r"8 slots are missing: 3 of 4 ranks are left with 24 slots .* for 32 experts"):
        cover(table, 4, [1, 2, 3], 32)


def test_without_ranks_not_even_a_dense_model_goes_on() -> None:
    dense = ExpertPlacement.without_experts(2).slot_to_expert
    assert cover(without(dense, 2, 1), 2, [0], 0).shape == slots_of(dense, 2, [0]).shape == (0, 0)
    for table, experts in ((dense, 0), (ExpertPlacement.linear(1, 2, 2).slot_to_expert, 2)):
        with pytest.raises(SpecError, match="none of 2 ranks is left"):
            cover(table, 2, [], experts)


def test_a_rank_that_comes_back_has_its_experts_again() -> None:
    initial = ExpertPlacement.linear(2, 8, 4, num_slots=12).slot_to_expert
    repaired = cover(without(initial, 4, 3), 4, [0, 1, 2], 8)
    again = with_again(repaired, initial, 4, 3)
    np.testing.assert_array_equal(again[:, 9:], initial[:, 9:])
    np.testing.assert_array_equal(again[:, :9], repaired[:, :9])
    np.testing.assert_array_equal(cover(again, 4, range(4), 8), again)


@settings(max_examples=60)
@given(st.data())
def test_any_history_of_losses_and_returns(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 20))
    least = smallest_slots(experts, ranks)
    slots = min(experts, least // ranks + data.draw(st.integers(0, 4))) * ranks
    initial = ExpertPlacement.linear(2, experts, ranks, num_slots=slots).slot_to_expert
    table, living = initial, list(range(ranks))
    for _ in range(data.draw(st.integers(1, 8))):
        gone = [rank for rank in range(ranks) if rank not in living]
        if gone and data.draw(st.booleans()):
            rank = data.draw(st.sampled_from(gone))
            living = sorted([*living, rank])
            table = with_again(table, initial, ranks, rank)
        elif len(living) > 1:
            rank = data.draw(st.sampled_from(living))
            living.remove(rank)
            table = without(table, ranks, rank)
        if len(living) * (slots // ranks) < experts:
            with pytest.raises(SpecError, match="slots are missing"):
                cover(table, ranks, living, experts)
            continue
        before, table = table, cover(table, ranks, living, experts)
        orphans = (count_copies(before, experts) == 0).sum(1)
        np.testing.assert_array_equal((before != table).sum(1), orphans)
        ExpertPlacement(slots_of(table, ranks, living), experts, len(living))
        assert (slots_of(table, ranks, [rank for rank in range(ranks) if rank not in living]) == EMPTY).all()
