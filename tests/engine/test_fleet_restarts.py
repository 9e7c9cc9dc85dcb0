"""A rank that is lost again and again is left alone for a while, not for ever."""

from __future__ import annotations

import time

import pytest

from coterie.engine import fleet
from coterie.engine.fleet import MOST_RESTARTS, Fleet, FleetPlan
from coterie.engine.fleet_place import Place
from coterie.engine.process import StartedProcess
from coterie.spec.errors import CoterieError
from coterie.spec.placement import ExpertPlacement


@pytest.mark.parametrize("draining", [False, True])
def test_it_is_tried_again_after_a_while(
    draining: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet, "CALM_SECONDS", 0.3)
    tried: list[float] = []

    def restart(rank: int) -> StartedProcess:
        assert rank == 1
        tried.append(time.monotonic())
        raise CoterieError("it cannot be loaded")

    slots = ExpertPlacement.linear(1, 4, 2, num_slots=8).slot_to_expert
    places = [Place(0, 0, None), Place(1, 1, None, state="lost")]
    one = Fleet(FleetPlan(slots, 4, 16, 64, restart), places, lambda news: None, lambda reason: None)
    one._restart(places[1])
    for _ in range(MOST_RESTARTS):
        one._events.get(timeout=5)()
    assert len(tried) == MOST_RESTARTS and places[1].state == "lost"
    assert "rank 1 is not started again for 0.3 s, as it was lost 4 times" in caplog.text
    one._draining = draining
    one._events.get(timeout=5)()
    if draining:
        assert len(tried) == MOST_RESTARTS
        return
    one._events.get(timeout=5)()
    assert len(tried) == MOST_RESTARTS + 2 or places[1].restarts == 2
    assert tried[MOST_RESTARTS] - tried[MOST_RESTARTS - 1] >= 0.3
