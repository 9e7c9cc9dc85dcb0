"""Payloads in parts: what leaves first, and where everything is found at the other end."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.comm.rows import FanOut, WayBack, far_first, sources_of

PER_RANK = 2


@settings(max_examples=200)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 7), st.integers(1, 4), st.integers(0, 999)
)
def test_outputs_are_found_where_their_parts_put_them(
    nodes: int, local: int, tokens: int, home: int, pieces: int, seed: int
) -> None:
    """Every rank sends (source, number) of its outputs for `home` in parts; the way back names the place of each."""
    size = nodes * local
    home %= size
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, size * PER_RANK, (tokens, 3)).astype(np.int32)
    way = WayBack.of(slots, PER_RANK, size)
    near = range(home // local * local, (home // local + 1) * local)
    cut = way.far_first(slots // PER_RANK, near, pieces)
    arriving: list[list[tuple[int, int]]] = [[] for _ in range(pieces + 1)]
    for rank in range(size):
        counts = np.zeros(size, np.int64)
        counts[home] = way.counts[rank]
        own = range(rank // local * local, (rank // local + 1) * local)
        received = np.zeros(size, np.int64)
        for number, part in enumerate(far_first(FanOut(np.arange(counts.sum()), counts), received, own, pieces)):
            arriving[number] += [(rank, int(row)) for row in part.plan.row]
    came = [output for part in arriving for output in part]
    whole = [(rank, number) for rank in range(size) for number in range(way.counts[rank])]
    assert [came[place] for place in cut.position.reshape(-1)] == [whole[place] for place in way.position.reshape(-1)]
    assert cut.pieces == pieces and cut.counts is way.counts
    expected = sources_of(far_first(FanOut(np.zeros(0, np.int64), way.counts * 0), way.counts, near, pieces))
    assert [rank for rank, _ in came] == expected.tolist(), "both ends cut alike"


def test_far_rows_lead_and_none_is_lost() -> None:
    plan = FanOut(np.array([4, 1, 0, 2, 3, 9, 8, 7]), np.array([2, 3, 1, 2]))
    first, second, rest = far_first(plan, np.array([5, 1, 0, 2]), range(1, 2), 2)
    assert first.plan.row.tolist() == [4, 8] and first.plan.counts.tolist() == [1, 0, 0, 1]
    assert second.plan.row.tolist() == [1, 9, 7] and second.plan.counts.tolist() == [1, 0, 1, 1]
    assert rest.plan.row.tolist() == [0, 2, 3] and rest.plan.counts.tolist() == [0, 3, 0, 0]
    assert (first.received + second.received + rest.received).tolist() == [5, 1, 0, 2]
    assert rest.received.tolist() == [0, 1, 0, 0] and first.received.tolist() == [2, 0, 0, 1]
