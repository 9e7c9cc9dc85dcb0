"""Several ranks step together: they sleep and wake together, and one rank's failure stays with its request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from mock_engine import greedy, make_add
from thread_ranks import LockstepRunner, ThreadRank, ThreadTransport, mock_ranks, start_group

from coterie.engine.errors import Desynchronised
from coterie.engine.messages import Abort, Drain, Regroup, Wake
from coterie.kernels.batch import ForwardBatch


class Caller:
    """A front end's part: each Add wakes all ranks."""

    def __init__(self, ranks: list[ThreadRank]) -> None:
        self.ranks, self.number = ranks, 0

    def wake(self) -> None:
        self.number += 1
        for rank in self.ranks:
            rank.inbox.put(Wake(self.number))

    def add(self, rank: int, name: str, prompt: list[int], max_tokens: int = 6, **params: object) -> None:
        self.ranks[rank].inbox.put(make_add(name, prompt, max_tokens, **params))
        self.wake()

    def drain(self) -> None:
        for rank in self.ranks:
            rank.inbox.put(Drain())
        self.wake()
        for rank in self.ranks:
            rank.join()
            assert rank.ended is None, rank.ended
            rank.core.check_integrity()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def test_one_request_on_four_ranks_and_then_all_sleep() -> None:
    """Complaint 17: ranks without work take part in every step."""
    ranks = mock_ranks(4)
    caller = Caller(ranks)
    caller.add(2, "a", [97, 98, 99], 20)
    until(lambda: bool(ranks[2].outputs("a")) and ranks[2].outputs("a")[-1].finish_reason == "length")
    assert ranks[2].tokens("a") == greedy([97, 98, 99], 20)
    time.sleep(0.1)
    steps = [rank.loop.group.step for rank in ranks]
    time.sleep(0.1)
    assert [rank.loop.group.step for rank in ranks] == steps and len(set(steps)) == 1, "idle ranks exchange nothing"
    counts = {len(rank.core.runner.batches) for rank in ranks}  # type: ignore[attr-defined]
    assert counts == {20}
    caller.add(0, "b", [5])
    caller.drain()
    assert ranks[0].tokens("b") == greedy([5], 6)


@pytest.mark.parametrize("seed", range(6))
def test_random_idle_patterns(seed: int) -> None:
    rng = random.Random(seed)
    ranks = mock_ranks(3, token_budget=8)
    caller = Caller(ranks)
    wanted: dict[str, tuple[int, list[int], int]] = {}
    for number in range(12):
        rank, name = rng.randrange(3), f"r{number}"
        prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(1, 30))]
        length = rng.randrange(1, 12)
        wanted[name] = (rank, prompt, length)
        caller.add(rank, name, prompt, length)
        if rng.random() < 0.2:
            caller.ranks[rank].inbox.put(Abort("unknown"))
        time.sleep(rng.choice([0, 0, 0.001, 0.02]))
    caller.drain()
    for name, (rank, prompt, length) in wanted.items():
        assert ranks[rank].tokens(name) == greedy(prompt, length), name
    assert len({len(rank.core.runner.batches) for rank in ranks}) == 1  # type: ignore[attr-defined]


def test_a_request_that_fails_fails_alone_and_the_ranks_stay_together() -> None:
    ranks = mock_ranks(2, lambda: LockstepRunner(poison=frozenset({7})))
    caller = Caller(ranks)
    caller.add(0, "good", [97, 98], 30)
    caller.add(0, "bad", [1, 7, 3])
    caller.add(0, "late", [4, 5])
    caller.add(1, "other", [60, 61], 30)
    caller.drain()
    assert ranks[0].tokens("good") == greedy([97, 98], 30) and ranks[1].tokens("other") == greedy([60, 61], 30)
    assert ranks[0].tokens("late") == greedy([4, 5], 6)
    (bad,) = ranks[0].outputs("bad")
    assert bad.finish_reason == "error" and "poisoned row" in (bad.error or "")
    assert len({rank.loop.group.step for rank in ranks}) == 1


def test_aborts_in_mid_stream() -> None:
    ranks = mock_ranks(2, lambda: LockstepRunner(delay=0.002), max_model_len=4000, blocks=1100)
    caller = Caller(ranks)
    for number in range(6):
        caller.add(number % 2, f"r{number}", [number + 1], 600 if number < 3 else 20)
    for number in range(3):
        until(lambda number=number: bool(ranks[number % 2].outputs(f"r{number}")))  # type: ignore[misc]
        ranks[number % 2].inbox.put(Abort(f"r{number}"))
    caller.drain()
    for number in range(6):
        rank, last = ranks[number % 2], ranks[number % 2].outputs(f"r{number}")[-1]
        assert last.finish_reason == ("abort" if number < 3 else "length")
        assert rank.tokens(f"r{number}") == greedy([number + 1], 600)[: len(rank.tokens(f"r{number}"))]


def test_all_leave_for_another_generation_at_the_same_step_boundary() -> None:
    ranks = mock_ranks(3, lambda: LockstepRunner(delay=0.001))
    caller = Caller(ranks)
    caller.add(0, "a", [97, 98], 60)
    until(lambda: len(ranks[0].tokens("a")) > 5)
    message = Regroup(2, [0, 1, 2], [0, 0, 0], b"", caller.number, gently=True)
    for rank in ranks:
        rank.inbox.put(message)
        time.sleep(0.02)
    for rank in ranks:
        rank.join()
        assert rank.ended == message
    assert len({rank.loop.group.step for rank in ranks}) == 1
    start_group(ranks, 2)
    caller.drain()
    assert ranks[0].tokens("a") == greedy([97, 98], 60)


class BreaksOnce(LockstepRunner):
    """Leaves the third forward in its middle: peers have its part, it has nothing."""

    def run(self, batch: ForwardBatch, *, micro_batches: int = 1) -> np.ndarray:
        result = super().run(batch, micro_batches=micro_batches)
        if len(self.batches) == 3:
            raise Desynchronised("broken", own=True)
        return result


def test_a_broken_generation_is_followed_by_another_and_nothing_is_lost() -> None:
    kinds = iter([BreaksOnce, LockstepRunner])
    ranks = mock_ranks(2, lambda: next(kinds)())
    caller = Caller(ranks)
    for rank in range(2):
        for number in range(3):
            caller.add(rank, f"{rank}/{number}", [rank + 1, number + 60], 12)
    for rank in ranks:
        rank.join()
        assert isinstance(rank.ended, Desynchronised)
    assert ranks[0].ended.own and not ranks[1].ended.own  # type: ignore[union-attr]
    start_group(ranks, 2)
    caller.drain()
    for rank in range(2):
        for number in range(3):
            assert ranks[rank].tokens(f"{rank}/{number}") == greedy([rank + 1, number + 60], 12)


def test_ranks_at_different_steps_notice() -> None:
    ranks = mock_ranks(2)
    until(lambda: all(rank.loop.group.step for rank in ranks))
    ranks[0].loop.group.step += 1
    Caller(ranks).wake()
    for rank in ranks:
        rank.join()
        assert isinstance(rank.ended, Desynchronised)
    assert any("ranks are at steps" in str(rank.ended) for rank in ranks)


def test_the_transport_of_these_tests_exchanges_rows() -> None:
    a, b = ThreadTransport.group(2)
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.append(b.all_to_all_v(np.array([[4], [5]]), [1, 1], [2, 1]).result()))
    thread.start()
    mine = a.all_to_all_v(np.array([[1], [2], [3]]), [1, 2], [1, 1]).result()
    thread.join(10)
    assert mine.tolist() == [[1], [4]] and got[0].tolist() == [[2], [3], [5]]
