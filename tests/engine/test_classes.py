"""Service classes as arithmetic: shares, reservations, virtual times. Properties hold for any weights and traffic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engine.classes import CLASS_NAMES, FACTORS, ONE_CLASS, ClassTable, Shares
from coterie.engine.config import ServiceConfig
from coterie.spec.errors import CoterieError

weights = st.tuples(*[st.floats(0.01, 100.0)] * 3)
some = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)


def table(values: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> ClassTable:
    return ClassTable.of(ServiceConfig(enabled=True, weights=values))


def test_shares_are_the_seeds_factors_times_the_weights() -> None:
    plain = table()
    assert plain.names == CLASS_NAMES and plain.weights == FACTORS == (1.8, 1.3, 1.0)
    assert [round(plain.share(rank), 4) for rank in range(3)] == [0.439, 0.3171, 0.2439]
    assert plain.reserved(100) == (43, 31, 24)
    assert table((1.0, 2.0, 1.0)).share(1) == pytest.approx(2.6 / 5.4)


def test_without_classes_everything_is_one_class() -> None:
    assert ClassTable.of(ServiceConfig()) is ONE_CLASS
    assert ONE_CLASS.rank("gold") == ONE_CLASS.rank(None) == 0
    assert ONE_CLASS.reserved(513) == (513,) and ONE_CLASS.slo_seconds == (math.inf,)


@given(weights, st.integers(1, 10**6))
def test_reservations_never_promise_more_than_there_is(values: tuple[float, float, float], total: int) -> None:
    classes = table(values)
    reserved = classes.reserved(total)
    assert sum(reserved) <= total
    assert all(own > classes.share(rank) * total - 1 for rank, own in enumerate(reserved))


@given(weights, some, st.lists(st.floats(0, 1e4), min_size=3, max_size=3), st.integers(0, 5000))
def test_a_split_gives_all_away_and_raises_the_least_times_together(
    values: tuple[float, float, float], ranks: list[int], times: list[float], tokens: int
) -> None:
    shares = Shares(table(values), 512, 64)
    shares.times = list(times)
    given_out = shares.split(tokens, ranks)
    assert sum(count for _, count in given_out) == tokens and all(count >= 0 for _, count in given_out)
    assert sorted(ranks) == sorted(rank for rank, _ in given_out)
    own = table(values).weights
    after = {rank: times[rank] + count / own[rank] for rank, count in given_out}
    for rank, count in given_out:
        if count > 1:  # one token more or less than the level: whole tokens only
            assert all(after[rank] - 2 / own[rank] <= after[other] + 2 / own[other] for other in ranks)


@settings(max_examples=200)
@given(
    weights,
    st.lists(st.tuples(some, st.lists(st.tuples(st.integers(0, 512), st.integers(0, 64)), min_size=3, max_size=3))),
)
def test_virtual_times_of_busy_classes_stay_within_the_bound(
    values: tuple[float, float, float], steps: list[tuple[list[int], list[tuple[int, int]]]]
) -> None:
    shares = Shares(table(values), 512, 64)
    assert shares.bound == 2 * max(512, 2 * 64) / min(table(values).weights)
    before: list[int] = []
    for busy, served in steps:
        for rank in busy:
            if rank not in before:
                shares.begin(rank, [other for other in before if other in busy])
        shares.charge([pair if rank in busy else (0, 0) for rank, pair in enumerate(served)], busy)
        times = [shares.times[rank] for rank in busy]
        assert max(times) - min(times) <= shares.bound * (1 + 1e-9)
        before = busy


def test_a_class_that_becomes_busy_claims_what_it_lent_within_the_bound() -> None:
    shares = Shares(table(), 64, 8)
    shares.charge([(0, 0), (1300, 0), (2000, 0)], busy=[1, 2])
    shares.begin(0, busy=[1, 2])
    assert shares.times[0] == max(shares.times[1:]) - shares.bound > 0
    assert [shares.is_ahead(rank, [0, 1, 2]) for rank in range(3)] == [False, False, True]
    assert not shares.is_ahead(1, [1, 2]) and shares.is_ahead(2, [1, 2])
    shares.times = [90.0, 100.0, 100.0]
    shares.begin(0, busy=[1, 2])
    assert shares.times[0] == 90.0, "it lent no more than that"
    shares.times = [5000.0, 1.0, 1.0]
    shares.begin(0, busy=[1, 2])
    assert shares.times[0] == 5000.0, "what it was served before it went idle is not forgotten"


def test_decoded_tokens_cost_twice() -> None:
    shares = Shares(table(), 512, 64)
    shares.charge([(18, 0), (0, 13), (10, 0)], busy=[0, 1, 2])
    assert shares.times == pytest.approx([10.0, 20.0, 10.0])
    assert [(c.prompt_tokens, c.decode_tokens) for c in shares.counters] == [(18, 0), (0, 13), (10, 0)]


@pytest.mark.parametrize("bad", [
    {"weights": (0.0, 1.0, 1.0)}, {"weights": (1.0, math.nan, 1.0)}, {"weights": (1.0, 1.0, math.inf)},
    {"slo_seconds": (-1.0, 1.0, 1.0)}, {"max_queued": (None, 0, None)},
])  # fmt: skip
def test_values_that_make_no_sense_are_refused(bad: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(CoterieError):
        ServiceConfig(enabled=True, **bad)  # type: ignore[arg-type]
