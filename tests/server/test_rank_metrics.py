"""What /metrics says of several ranks: how even each layer's load is, and what was moved or lost."""

from __future__ import annotations

import pytest

from coterie.engine.fleet_stats import merged
from coterie.engine.messages import GroupStats, RankStats, Stats
from coterie.server.rank_metrics import rank_families


def stats(**values: object) -> Stats:
    return Stats(1, 0, 0.5, 10, 0, 0, 0, 30, 20, 7, {}, **values)  # type: ignore[arg-type]


def samples(one: Stats) -> dict[tuple[str, ...], float]:
    found = {}
    for family in rank_families("coterie:", "demo", one):
        for sample in family.samples:
            labels = ("layer", "rank", *(("hop",) if "hop" in sample.labels else ()))
            found[(sample.name, *(sample.labels.get(label, "") for label in labels))] = sample.value
    return found


def test_balancedness_has_a_number_for_each_layer() -> None:
    """It is the same on all ranks, so it is not summed; a rank that has not decided yet says nothing."""
    group = GroupStats(3, 2, 1, 0.5, 0.2, 4, ranks=(RankStats(0, 0, "serving"), RankStats(1, 0, "lost")))
    living = [stats(experts_moved=2), stats(experts_moved=3, moves_failed=1, balancedness={1: 0.75, 2: 1.0})]
    found = samples(merged(living, [], group))
    assert found["coterie:ep_layer_balancedness", "1", ""] == 0.75
    assert found["coterie:ep_layer_balancedness", "2", ""] == 1.0
    assert found["coterie:ep_experts_moved_total", "", ""] == 5
    assert found["coterie:ep_expert_moves_failed_total", "", ""] == 1
    assert (found["coterie:rank_serving", "", "0"], found["coterie:rank_serving", "", "1"]) == (1, 0)


def test_link_use_is_what_all_ranks_sent_over_what_they_could_have() -> None:
    group = GroupStats(3, 2, 1, 0.5, 0.2, 4, ranks=(RankStats(0, 0, "serving"), RankStats(1, 0, "serving")))
    near, far = "inside a node", "between nodes"
    living = [stats(hops={near: (100, 1000.0), far: (60, 80.0)}), stats(hops={near: (50, 500.0), far: (20, 20.0)})]
    found = samples(merged(living, [stats(hops={far: (10, 50.0)})], group))
    assert found["coterie:ep_sent_bytes_total", "", "", near] == 150
    assert found["coterie:ep_link_capacity_bytes_total", "", "", far] == 150
    assert found["coterie:ep_link_use", "", "", near] == pytest.approx(0.1)
    assert found["coterie:ep_link_use", "", "", far] == pytest.approx(0.6), "a lost rank's counts stay"
    unknown = samples(merged([stats(hops={near: (5, 0.0)})], [], group))
    assert unknown["coterie:ep_sent_bytes_total", "", "", near] == 5
    assert ("coterie:ep_link_use", "", "", near) not in unknown, "rates that nobody probed"


def test_one_rank_has_none_of_it() -> None:
    assert not samples(stats())
