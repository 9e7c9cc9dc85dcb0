"""When a rank is taken for lost: silence and standing still, and what is neither. And the table of what ranks hold."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from coterie.engine.fleet_place import JOIN_SECONDS, Place
from coterie.engine.fleet_table import ExpertTable
from coterie.engine.messages import Beat
from coterie.kernels.native import NativeKernels
from coterie.spec.errors import SpecError
from coterie.spec.placement import ExpertPlacement

STALL = 20.0


class Clock:
    """A rank that beats twice a second, and the first fault that is found."""

    def __init__(self, **values: bool) -> None:
        self.now = 100.0
        self.place = Place(1, 0, None, heard=self.now, active=self.now, **values)  # type: ignore[arg-type]

    def beat(self, seconds: float, work: int, *, waits: bool, step: int = 1) -> tuple[str, float] | None:
        """`work` more with each beat."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.place.heard = self.now
            self.place.note(Beat(step, self.place.beat.work + work, waits))
            fault = self.place.fault(self.now, STALL)
            if fault is not None:
                return fault
        return None


def test_work_waiting_and_idling_are_no_stall() -> None:
    clock = Clock(has_joined=True)
    assert clock.beat(60, 1, waits=False) is None
    assert clock.beat(60, 0, waits=True) is None
    assert clock.beat(STALL, 0, waits=False) is None


@pytest.mark.parametrize("has_joined", [True, False])
def test_standing_still_is_a_fault_from_its_last_work_on(has_joined: bool) -> None:
    clock = Clock(has_joined=has_joined)
    clock.beat(5, 1, waits=False)
    last = clock.now
    fault = clock.beat(60, 0, waits=False)
    assert fault is not None and fault[1] == last and last + STALL < clock.now <= last + STALL + 1
    assert "stood still for 20.5 s" in fault[0]


def test_silence_is_a_fault_sooner_for_a_rank_that_has_joined() -> None:
    for has_joined, patience in ((True, 1.5), (False, JOIN_SECONDS)):
        place = Clock(has_joined=has_joined).place
        assert place.fault(100 + patience, STALL) is None
        assert place.fault(100.1 + patience, STALL) == (f"said nothing for {patience + 0.1:.1f} s", 100.0)


def test_a_rank_that_was_silent_when_it_was_called_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the cable of a machine with several ranks is out: all are lost together, one call later."""
    place = Place(2, 1, None, heard=100.0, active=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: 101.0)
    place.ask()
    assert place.fault(105.0, STALL) is None, "a new process takes its time"
    place.heard = 102.0
    place.join()
    assert place.rank_stats().state == "serving"
    assert place.fault(103.6, STALL) is not None
    monkeypatch.setattr(time, "monotonic", lambda: 103.2)
    place.ask()
    assert place.rank_stats().state == "member"
    assert place.fault(103.6, STALL) == ("said nothing for 1.6 s", 102.0)
    place.heard = 103.3
    assert place.fault(110.0, STALL) is None, "it has heard the call, and joins"
    place.revive(None)  # type: ignore[arg-type]
    assert (place.state, place.life, place.has_joined) == ("ready", 1, False)


def test_a_long_kernel_shows_that_it_gets_on() -> None:
    """From another thread, while one call runs; a pool of one thread too."""
    for threads in (1, 2):
        kernels = NativeKernels(threads=threads)
        rows, weight = np.ones((20_000, 512), np.float32), np.ones(512, np.float32)
        seen, over = set[int](), threading.Event()

        def watch(kernels: NativeKernels, seen: set[int], over: threading.Event) -> None:
            while not over.is_set():
                seen.add(kernels.progress())
                time.sleep(0.0005)

        watcher = threading.Thread(target=watch, args=(kernels, seen, over))
        watcher.start()
        before = kernels.progress()
        kernels.norm(rows, weight, 1e-6)
        after = kernels.progress()
        over.set()
        watcher.join()
        assert after > before
        idle = kernels.progress()
        time.sleep(0.02)
        assert kernels.progress() == idle


def test_the_table_follows_moves_losses_and_returns() -> None:
    initial = ExpertPlacement.linear(2, 6, 3, num_slots=9).slot_to_expert
    table = ExpertTable(initial, 3, 6)
    table.moved(2, 1, [0, 1, 5])
    assert table.slots[1, 6:].tolist() == [0, 1, 5] and (table.slots[0] == initial[0]).all()
    table.lose(0)
    held = np.frombuffer(table.form([1, 2]), "<i4").reshape(2, 6)
    assert held[1, 3:].tolist() == [0, 1, 5], "what a rank holds since a move is not loaded again"
    assert all(set(row.tolist()) == set(range(6)) for row in held)
    table.back(0)
    assert (table.slots[:, :3] == initial[:, :3]).all()
    table.lose(1)
    table.lose(2)
    with pytest.raises(SpecError, match="3 slots are missing"):
        table.form([0])
