"""Speeds measured while serving: what is counted, when conclusions are drawn, that they follow the numbers."""

from __future__ import annotations

import numpy as np

from coterie.comm.live import FADE, WINDOW, LiveState


def told(state: LiveState, words: list[list[int]]) -> bool:
    """A window of headers with the same words; whether its end came with the last one."""
    due = [state.heard(np.array(words, np.int64)) for _ in range(WINDOW)]
    assert not any(due[:-1])
    return due[-1]


def test_only_kernels_with_enough_rows_count() -> None:
    state = LiveState(2)
    state.computed(10_000_000, 15, 1)
    state.computed(10_000_000, 64, 5)
    assert state.words().tolist() == [0, 0, 0, 0]
    state.computed(1_000_000, 100, 2)
    assert state.words()[0] == 10_000
    state.computed(3_000_000, 100, 2)
    assert state.words()[0] == int((1e6 * FADE + 3e6) / (100 * FADE + 100))


def test_the_best_payload_of_each_link_counts() -> None:
    state = LiveState(2)
    state.carried(1000, 2000, 1)
    state.carried(100_000, 200_000, 10_000_000)
    state.carried(0, 300_000, 10_000_000)
    state.carried(500_000, 0, 1_000_000)
    assert state.words().tolist() == [0, 500_000_000, 30_000_000, 21_000_001]
    assert state.words()[3] == 0, "time is told once"


def test_a_slow_rank_is_known_by_all_after_a_window() -> None:
    state = LiveState(3)
    assert told(state, [[100, 0, 9, 3], [400, 0, 5, 4], [100, 7, 8, 0]])
    assert state.carrying == 4
    changed, rates = state.conclude()
    assert changed and state.speeds.tolist() == [1.0, 0.25, 1.0]
    assert (rates.inside, rates.between) == (7.0, 5.0)
    assert state.words()[1:].tolist() == [0, 0, 0], "a new window has begun"
    told(state, [[100, 0, 0, 0], [390, 0, 0, 0], [100, 0, 0, 0]])
    changed, rates = state.conclude()
    assert not changed and (rates.inside, rates.between) == (0.0, 0.0)
    told(state, [[100, 0, 0, 0], [0, 0, 0, 0], [100, 0, 0, 0]])
    assert not state.conclude()[0], "a rank that has not computed is not judged"
    told(state, [[100, 0, 0, 0], [10**9, 0, 0, 0], [100, 0, 0, 0]])
    assert state.conclude()[0] and state.speeds.min() == 0.125


def test_payloads_that_are_under_way_together_count_once() -> None:
    state = LiveState(1)
    state.carried(0, 1 << 20, 5_000)
    state.carried(0, 1 << 20, 4_000)
    state.together(3_000)
    state.heard(state.words()[None])
    assert state.carrying == 6_000
    state.heard(state.words()[None])
    assert state.carrying == 0, "said once"
