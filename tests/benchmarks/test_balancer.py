"""balancer.py: EPLB re-stated is EPLB, the marks that do not depend on the machine hold, and a miss is reported."""

from __future__ import annotations

import balancer as benchmark
import numpy as np
import pytest
from balancer_inputs import FLASHLB, README, assignments, eplb, inputs

from coterie.spec.balance import Room, moves, place
from coterie.spec.placement import ExpertPlacement


def test_the_published_example_of_eplb() -> None:
    assert eplb(README, 16, 4, 2, 8).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    busiest = FLASHLB.sum() / 8 / benchmark.by_equal(eplb(FLASHLB, 16, 1, 1, 8), FLASHLB, 8)
    assert busiest == pytest.approx([232])


def test_inputs_are_seeded_and_capped() -> None:
    loads, again = inputs(2), inputs(2)
    for name, load in loads.items():
        assert (load == again[name]).all()
        assert load.sum(1) == pytest.approx([8192 * 8] * 2)
        assert load.max() <= 8192 * (1 + 1e-12)
    assert assignments(np.array([[100.0] + [1.0] * 15]))[0, 0] == 8192


def test_planned_loads_of_every_cluster_and_the_worked_examples(capsys: pytest.CaptureFixture[str]) -> None:
    marks, loads = benchmark.Marks(), inputs(2)
    chosen = {name: loads[name] for name in ("zipf 0.4", "zipf 1.2", "real", *benchmark.ADVERSARIAL)}
    benchmark.planned_loads(chosen, benchmark.CLUSTERS, marks)
    benchmark.worked_examples(marks)
    assert marks.report(), capsys.readouterr().out
    assert len(marks.lines) == 6
    assert "| real | 320/64 8 nodes |" in capsys.readouterr().out


def test_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    marks = benchmark.Marks()
    benchmark.traffic(3000, marks)
    assert marks.report(), capsys.readouterr().out


@pytest.mark.slow
def test_drift(capsys: pytest.CaptureFixture[str]) -> None:
    marks = benchmark.Marks()
    benchmark.drifting(6, marks, (16,))
    assert marks.report(), capsys.readouterr().out


def test_a_window_of_drift_is_followed_with_few_moves() -> None:
    plan, now = benchmark.drift(3, 2, 0.8)
    cluster = benchmark.Cluster(288, 32)
    before = cluster.ours(plan)
    after = cluster.ours(now, before, 12)
    assert 0 < moves(before, after).max() <= 12
    was = benchmark.by_split(before.slot_to_expert, now, now, 32)
    is_now = benchmark.by_split(after.slot_to_expert, now, now, 32)
    assert (is_now > was + 0.02).all()


def test_the_split_is_near_its_bound_and_one_layer_is_as_good() -> None:
    load = inputs(4)["real"]
    unseen = np.round(benchmark.noisy(load)).astype(np.int64)
    for slots in (288, 320):
        placed = place(load, Room(num_slots=slots, num_ranks=32))
        table = placed.slot_to_expert.astype(np.int64)
        best = benchmark.certified_optimum(table, unseen.astype(float), 32)
        plan = benchmark.SplitPlan.of(table, 256, 32).expecting(load)
        ours = benchmark.balance(plan.whole(unseen), 32)
        assert (ours <= best + 1e-9).all()
        assert (best - ours).mean() <= 0.01
        one = [benchmark.LayerSplit(placed, n, expected=load[n]).whole(unseen[n]) for n in range(4)]
        assert benchmark.balance(np.stack(one), 32) == pytest.approx(ours, abs=0.002)


def test_a_missed_mark_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    marks = benchmark.Marks()
    marks.add("good", True)
    marks.add("bad", False)
    assert not marks.report()
    assert "- MISSED: bad" in capsys.readouterr().out


def test_second_copies_on_a_rank_are_no_help() -> None:
    """EPLB may place them; our tables cannot hold them."""
    table = np.array([[0, 0, 1, 2]])
    load = np.array([[4.0, 2.0, 2.0]])
    assert benchmark.by_split(table, load, load, 2)[0] == pytest.approx(1.0)
    with pytest.raises(Exception, match="rank 0 holds expert 0 of layer 0 twice"):
        ExpertPlacement(table, 3, 2)
