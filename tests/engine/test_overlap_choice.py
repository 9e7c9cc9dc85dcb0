"""When a step is cut in two: what is measured decides, all ranks alike, and a loser is hardly tried."""

from __future__ import annotations

import random

import pytest

from coterie.engine.overlap_choice import OverlapChooser


def simulate(chooser: OverlapChooser, steps: int, rows: list[int], cost: dict[int, float], seed: int = 0) -> list[int]:
    """Run steps that cost `cost[micro-batches]` seconds, with 10 % noise, on ranks of which the last is slowest."""
    noise = random.Random(seed)
    chosen = []
    for _ in range(steps):
        parts = chooser.choose(rows)
        chosen.append(parts)
        seconds = cost[parts] * noise.uniform(0.95, 1.05)
        chooser.learn([seconds * 0.5] * (len(rows) - 1) + [seconds])
    return chosen


@pytest.mark.parametrize(("cost", "faster"), [({1: 1.0, 2: 0.6}, 2), ({1: 1.0, 2: 1.7}, 1)])
def test_the_faster_form_is_found_and_the_other_is_rarely_tried(cost: dict[int, float], faster: int) -> None:
    chooser = OverlapChooser("auto")
    chosen = simulate(chooser, 2_000, [64, 60, 0], cost)
    share = chosen.count(3 - faster) / len(chosen)
    assert 0 < share < 0.03
    best = min(cost.values()) * len(chosen)
    assert sum(cost[parts] for parts in chosen) < 1.05 * best, "never 5 % slower than the better form"
    assert chosen[-100:].count(faster) > 90


def test_sizes_are_judged_apart_and_a_change_is_noticed() -> None:
    chooser = OverlapChooser("auto")
    few = simulate(chooser, 100, [4, 4], {1: 1.0, 2: 1.5})
    many = simulate(chooser, 100, [512, 512], {1: 1.0, 2: 0.7})
    assert few[-50:].count(1) > 45 and many[-50:].count(2) > 45
    assert simulate(chooser, 50, [4, 4], {1: 1.0, 2: 1.5}).count(1) > 45, "few rows were not forgotten meanwhile"
    late = simulate(chooser, 600, [512, 512], {1: 1.0, 2: 1.4})  # the link has become faster
    assert late[-100:].count(1) > 90


def test_all_ranks_choose_alike() -> None:
    """Two ranks feed the same gathered numbers: their choices never differ."""
    one, other = OverlapChooser("auto"), OverlapChooser("auto")
    noise = random.Random(3)
    for _ in range(3_000):
        rows = [noise.choice([0, 1, 7, 40, 300]) for _ in range(4)]
        parts = one.choose(rows)
        assert parts == other.choose(rows)
        seconds = [noise.uniform(0.5, 2.0) for _ in rows]
        one.learn(seconds)
        other.learn(seconds)


def test_what_nobody_can_cut_is_not_cut() -> None:
    for mode in ("auto", "on"):
        chooser = OverlapChooser(mode)  # type: ignore[arg-type]
        assert [chooser.choose(rows) for rows in ([], [0, 0], [1, 1, 1])] == [1, 1, 1]
    assert OverlapChooser("on").choose([2, 0]) == 2
    assert OverlapChooser("off").choose([512, 512]) == 1
