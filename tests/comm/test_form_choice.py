"""The form of the exchange: expectations far apart decide, near ones are tried; while serving the faster one stays."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_link_probe import FAST, PREFILL, SLOW, finish, meshes

from coterie.comm.exchange import FormName, FormPolicy
from coterie.comm.form_choice import RETRY_WINDOWS, TRIAL_BYTES, TRIAL_SECONDS, FormChoice, near, open_exchange, settle
from coterie.comm.live import WINDOW, Rates
from coterie.comm.local import LocalTransport
from coterie.comm.mesh import Mesh
from coterie.comm.probe import Links, Traffic
from coterie.spec.placement import ExpertPlacement

UNKNOWN = Rates(0.0, 0.0)
EIGHT = [0] * 4 + [1] * 4
ONE_WAY = replace(PREFILL, back_bytes=64)
"""Rows out weigh all, of which the hierarchical form sends between nodes much less."""


class Tried:
    """A trial that takes what it is told to, by policy and tokens; `log`: what was asked."""

    def __init__(self, seconds: Callable[[FormPolicy, int, int], float]) -> None:
        self.seconds, self.log = seconds, list[tuple[FormPolicy, int]]()

    def __call__(self, mesh: Mesh, policy: FormPolicy, tokens: int) -> Generator[Any, None, float]:
        self.log.append((policy, tokens))
        handle = mesh.world.all_gather(np.zeros(1, np.int64))
        yield handle
        handle.result()
        return self.seconds(policy, tokens, mesh.world.rank)


def settled(nodes: list[int], links: Links, traffic: Traffic, trial: Tried) -> tuple[FormPolicy, list[Any]]:
    found = finish([settle(mesh, links, traffic, trial) for mesh in meshes(nodes)])
    assert len({str(one) for one in found}) == 1, "all ranks choose alike and say the same"
    return found[0][0], list(found[0][1])


def test_an_exchange_is_opened_with_a_reason() -> None:
    placement = ExpertPlacement.linear(2, 8, 4, 2)
    opened = finish([open_exchange(rank, placement, PREFILL) for rank in LocalTransport.group(4)])
    assert len({exchange.policy for exchange, _ in opened}) == 1
    assert "a small exchange" in opened[0][1][0].reason
    assert opened[0][1][-1].value == "8192 B out, 8192 B back"
    asked = finish(
        [open_exchange(rank, placement, PREFILL, FormPolicy("hierarchical")) for rank in LocalTransport.group(4)]
    )
    assert asked[2][0].policy.sized == "hierarchical" and asked[2][1][0].reason == "asked for"
    flat = ExpertPlacement.linear(2, 8, 2)
    one_node = finish([open_exchange(rank, flat, PREFILL) for rank in LocalTransport.group(2)])
    assert one_node[0][0].chooser is None, "there is nothing to choose from"


@pytest.mark.parametrize("faster", ["flat", "hierarchical"])
def test_near_forms_are_tried_and_the_slowest_rank_counts(faster: FormName) -> None:
    """Every rank but the last finds the other form faster; the slowest counts."""
    assert near(meshes(EIGHT)[0], SLOW, PREFILL) == ["flat", "hierarchical"]
    by_rank = {True: (1.5e-3, 2e-3), False: (1e-3, 4e-3)}
    trial = Tried(lambda policy, tokens, rank: tokens * by_rank[policy.sized == faster][rank == 7])
    policy, (choice, _) = settled(EIGHT, SLOW, PREFILL, trial)
    assert policy.sized == choice.value == faster
    assert "expected for 512 tokens" in choice.reason and "tried: flat" in choice.reason


def test_trials_that_contradict_each_other_leave_the_expectation() -> None:
    """Every second trial of a form takes twice as long, so neither wins three rounds of four."""
    calls: dict[tuple[str, int], int] = {}

    def uneven(policy: FormPolicy, tokens: int, rank: int) -> float:
        number = calls[policy.sized, rank] = calls.get((policy.sized, rank), -1) + 1
        return tokens * 1e-4 * ((1, 2) if policy.sized == "flat" else (2, 1))[number // 2 % 2]

    trial = Tried(uneven)
    policy, (choice, *_) = settled(EIGHT, SLOW, PREFILL, trial)
    assert policy.sized == "hierarchical" and "too near to tell" in choice.reason


def test_far_forms_are_not_tried() -> None:
    assert near(meshes(EIGHT)[0], SLOW, ONE_WAY) == ["hierarchical"]
    trial = Tried(lambda policy, tokens, rank: 0.01)
    policy, (choice, _) = settled(EIGHT, SLOW, ONE_WAY, trial)
    assert policy.sized == "hierarchical" and "tried" not in choice.reason
    assert {tokens for _, tokens in trial.log} == {PREFILL.small}, "short steps only"


def test_trials_take_bounded_time_and_bytes() -> None:
    """Links ten times slower than expected: fewer tokens are tried, and times are carried over to the long step."""
    trial = Tried(lambda policy, tokens, rank: tokens * 60e-3)
    _, (choice, _) = settled(EIGHT, SLOW, PREFILL, trial)
    long = [tokens for policy, tokens in trial.log[:: len(EIGHT)] if policy.capacity == 0 and tokens != PREFILL.small]
    spent = sum(tokens * 60e-3 for tokens in long[4:])
    assert spent <= TRIAL_SECONDS + 0.5 and "tokens)" in choice.reason
    wide = Traffic(out_bytes=1 << 16, back_bytes=1 << 16, top_k=8, tokens=1 << 14, small=0)
    trial = Tried(lambda policy, tokens, rank: tokens * 1e-9)
    settled(EIGHT, SLOW, wide, trial)
    assert max(tokens for _, tokens in trial.log) * 9 * (1 << 16) <= TRIAL_BYTES


@pytest.mark.parametrize("fixed", [1e-3, 3e-3])
def test_short_steps_take_what_was_faster(fixed: float) -> None:
    trial = Tried(lambda policy, tokens, rank: fixed if policy.capacity else 2e-3)
    policy, chosen = settled([0, 0], FAST, PREFILL, trial)
    assert policy.capacity == (8 if fixed < 2e-3 else 0)
    assert chosen[-1].value == ("fixed capacity" if policy.capacity else "flat") and "tried: " in chosen[-1].reason


class Serving:
    """Windows of exchanges whose true times are `seconds(form)`; the choice of two ranks, which must be equal."""

    def __init__(self, links: Links, traffic: Traffic = PREFILL) -> None:
        self.choices = [FormChoice(mesh, links, traffic) for mesh in meshes(EIGHT)[:2]]
        self.policy = FormPolicy("flat", 8)
        self.pairs = np.full((8, 8), 100 * PREFILL.top_k // 8)

    def windows(self, count: int, seconds: dict[str, float], rates: Rates = UNKNOWN) -> list[str]:
        used = []
        for _ in range(count):
            form = self.policy.sized
            for header in range(WINDOW):
                for choice in self.choices:
                    late = 5.0 if header == 7 else 1.0
                    choice.heard(int(seconds[form] * late * 1e9))
                    if header == WINDOW - 1:
                        self.policy, before = choice.conclude(rates, FormPolicy(form, 8)), self.policy
                        assert choice is self.choices[0] or before == self.policy, "ranks differ"
                    choice.entered(form, self.pairs)
            used.append(form)
            assert self.policy.capacity == 8
        return used


@pytest.mark.parametrize("better", ["flat", "hierarchical"])
def test_the_other_form_is_looked_at_now_and_then_and_the_faster_stays(better: str) -> None:
    used = Serving(SLOW).windows(200, {"flat": 1.0, "hierarchical": 1.0, better: 0.9})
    assert used[:3] == ["flat", "hierarchical", better]
    worse = "flat" if better == "hierarchical" else "hierarchical"
    assert worse not in used[2:RETRY_WINDOWS]
    assert 1 <= used[RETRY_WINDOWS:].count(worse) <= 200 // RETRY_WINDOWS


def test_changed_links_make_the_other_form_be_tried_at_once() -> None:
    serving = Serving(SLOW)
    serving.windows(6, {"flat": 0.1, "hierarchical": 0.12})
    used = serving.windows(6, {"flat": 1.0, "hierarchical": 0.8})
    assert used == ["flat", *["hierarchical"] * 5]
    assert serving.windows(6, {"flat": 0.1, "hierarchical": 0.12}) == ["hierarchical", *["flat"] * 5]


def test_rates_that_leave_no_doubt_decide_alone() -> None:
    serving = Serving(FAST, ONE_WAY)
    assert near(serving.choices[0].mesh, FAST, ONE_WAY) == ["flat", "hierarchical"]
    slow = Rates(inside=400e6, between=6e6)
    assert serving.windows(3, {"flat": 0.1, "hierarchical": 1.0}, slow) == ["flat", "hierarchical", "hierarchical"]


def test_nothing_is_concluded_from_nothing() -> None:
    (choice, _) = Serving(SLOW).choices
    assert choice.conclude(UNKNOWN, FormPolicy("hierarchical", 4)) == FormPolicy("hierarchical", 4)
