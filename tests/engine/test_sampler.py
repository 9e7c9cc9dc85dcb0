"""Sampler against plain definitions: exact candidate sets, penalties, frequencies, log-probabilities, bad rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.engine.messages import SamplingParams
from coterie.engine.request import Request
from coterie.engine.sampler import (
    LOWEST_LOGPROB,
    BadRow,
    Sampler,
    candidates,
    draw,
    largest,
    prompt_logprobs,
    token_logprobs,
    uniform,
)

VOCAB = 40


def make_request(
    output: list[int] | None = None, prompt: tuple[int, ...] = (1, 2), seed: int = 0, index: int = 0, **fields: Any
) -> Request:
    request = Request("r", prompt, SamplingParams(**fields), 1000, sample_index=index, seed=seed)
    request.token_ids += output or []
    return request


def random_rows(count: int, seed: int = 0, vocab: int = VOCAB) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, vocab)).astype(np.float32) * 3


def sample_one(row: NDArray[np.float32], request: Request, sampler: Sampler | None = None) -> int:
    result = (sampler or Sampler()).sample(row[None], [request])
    assert result.errors == [None]
    return result.token_ids[0]


def allowed(row: NDArray[np.float32], **fields: Any) -> set[int]:
    """The candidates; asserts that what is drawn over a grid of uniform numbers is among them, in order of id."""
    params = SamplingParams(**fields)
    weights = np.exp((row - row.max()) / np.float32(params.temperature))
    ids = candidates(row, weights, params)
    found = set(range(len(row)) if ids is None else ids.tolist())
    drawn = [draw(row, params, number) for number in (*np.linspace(0, 1, 50, endpoint=False), math.nextafter(1, 0))]
    assert drawn == sorted(drawn) and set(drawn) <= found
    return found


# Greedy


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5])
def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(temperature: float) -> None:
    rows = random_rows(5)
    rows[3, [7, 30]] = 50.0
    requests = [make_request(temperature=temperature) for _ in range(5)]
    result = Sampler().sample(rows, requests)
    assert result.token_ids == rows.argmax(axis=1).tolist() and result.token_ids[3] == 7
    assert result.errors == [None] * 5 and result.logprobs == [None] * 5


def test_a_tiny_temperature_is_finite_and_nearly_greedy() -> None:
    rows = random_rows(20) * 1000
    requests = [make_request(temperature=1e-4, seed=i) for i in range(20)]
    assert Sampler().sample(rows, requests).token_ids == rows.argmax(axis=1).tolist()


def test_rows_do_not_know_each_other() -> None:
    rows = random_rows(6, vocab=300)
    requests = [
        make_request(temperature=0),
        make_request(seed=1, logprobs=3),
        make_request([5, 5], seed=2, repetition_penalty=1.3),
        make_request(seed=3, top_p=0.7),
        make_request(temperature=0, logit_bias={3: 50.0}),
        make_request(seed=4, top_k=5, min_p=0.01),
    ]
    together = Sampler().sample(rows, requests)
    alone = [Sampler().sample(rows[i : i + 1], [request]) for i, request in enumerate(requests)]
    assert together.token_ids == [result.token_ids[0] for result in alone]
    assert together.logprobs == [result.logprobs[0] for result in alone]
    assert Sampler().sample(rows[:0], []).token_ids == []


def test_logits_are_left_as_they_are() -> None:
    rows = random_rows(2)
    before = rows.copy()
    rows.setflags(write=False)
    Sampler((1,)).sample(rows, [make_request([3], logit_bias={3: 1.0}, min_tokens=5, presence_penalty=1.0)] * 2)
    assert np.array_equal(rows, before)


# Candidates


def reference_candidates(row: NDArray[np.float32], params: SamplingParams) -> set[int]:
    """The definition, one token after the other."""
    scaled = (row.astype(np.float64) - float(row.max())) / params.temperature
    weights = np.exp(scaled)
    ids = [i for i in range(len(row)) if weights[i] >= params.min_p]
    ids.sort(key=lambda i: (-row[i], i))
    if params.top_k > 0:
        ids = ids[: params.top_k]
    total, mass, kept = sum(weights[i] for i in ids), 0.0, []
    for i in ids:
        if kept and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return set(kept)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 2, 7, VOCAB]),
    top_p=st.sampled_from([0.0, 1e-9, 0.31, 0.83, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_candidates_are_those_of_the_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = np.random.default_rng(seed).integers(-4, 4, VOCAB).astype(np.float32) / 2  # many ties
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = allowed(row, **fields)
    assert found == reference_candidates(row, SamplingParams(**fields))


def test_top_p_zero_and_top_k_one_are_the_top_token() -> None:
    for row in random_rows(10):
        assert allowed(row, top_p=0.0) == allowed(row, top_k=1) == allowed(row, min_p=1.0) == {int(row.argmax())}


def test_ties_at_the_edge_go_to_lower_ids() -> None:
    row = np.zeros(VOCAB, np.float32)
    assert allowed(row, top_k=3) == {0, 1, 2}
    assert allowed(row, top_p=0.1) == {0, 1, 2, 3}
    assert allowed(row, min_p=1.0) == set(range(VOCAB))


def test_a_wide_nucleus_needs_more_than_the_first_guess() -> None:
    row = np.random.default_rng(3).normal(size=5000).astype(np.float32) * 0.1
    ids = allowed(row, top_p=0.9)
    assert ids == reference_candidates(row, SamplingParams(top_p=0.9)) and len(ids) > 4000


def test_masked_tokens_never_come() -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[4, 9]] = 0.0
    for fields in ({}, {"top_k": 30}, {"top_p": 0.999}, {"min_p": 0.0, "temperature": 2.0}):
        assert {draw(row, SamplingParams(**fields), number) for number in np.linspace(0, 1, 99)} == {4, 9}
    assert draw(row, SamplingParams(), 0.0) == 4 and draw(row, SamplingParams(), math.nextafter(1, 0)) == 9


@settings(max_examples=50)
@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 1.0, 2.5]), min_size=1, max_size=30), st.integers(0, 35))
def test_largest_is_a_stable_sort(values: list[float], count: int) -> None:
    row = np.array(values, np.float32)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert largest(row, count).tolist() == expected


# Chance


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.05, "temperature": 1.5}],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_frequencies_are_the_probabilities(fields: dict[str, Any]) -> None:
    row, params, count = random_rows(1, 5)[0], SamplingParams(**fields), 20_000
    ids = sorted(reference_candidates(row, params))
    weights = np.exp(row[ids].astype(np.float64) / params.temperature)
    expected = count * weights / weights.sum()
    sampler, request = Sampler(), make_request(seed=1234, **fields)
    seen = np.zeros(VOCAB)
    for token_index in range(count):
        seen[draw(row, params, uniform(request.seed, 0, token_index))] += 1
    assert seen.sum() == seen[ids].sum()
    assert sample_one(row, request, sampler) == draw(row, params, uniform(1234, 0, 0))
    large = expected >= 5
    observed = np.append(seen[ids][large], seen[ids][~large].sum())
    target = np.append(expected[large], expected[~large].sum())
    used = target > 0
    chi_square = float(((observed[used] - target[used]) ** 2 / target[used]).sum())
    freedom = int(used.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4, "less likely than about 1 in 10,000"


def test_uniform_numbers_are_uniform_and_depend_on_all_three() -> None:
    numbers = np.array([uniform(seed, index, token) for seed in (0, 9) for index in (0, 1) for token in range(1500)])
    assert len(set(numbers)) == len(numbers) and numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 300) ** 2 / 300).sum() < 50
    streams = numbers.reshape(4, 1500)
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.1
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_the_stream_of_a_seed_never_changes() -> None:
    known = [0.011546754286331562, 0.8647170113210697, 0.9535326391157232]
    assert [uniform(0, 0, 0), uniform(42, 1, 7), uniform(2**64 - 1, 127, 10**6)] == known
    assert uniform(-1, 0, 3) == uniform(2**64 - 1, 0, 3)


def test_a_retry_continues_the_same_stream() -> None:
    rows = random_rows(12, 8)
    whole = make_request(seed=5, index=2, repetition_penalty=1.2, frequency_penalty=0.3)
    sampler = Sampler()
    for row in rows:
        whole.token_ids.append(sample_one(row, whole, sampler))
    retried = make_request(whole.token_ids[2:8], seed=5, index=2, repetition_penalty=1.2, frequency_penalty=0.3)
    for row in rows[6:]:
        retried.token_ids.append(sample_one(row, retried, sampler))
    assert retried.token_ids == whole.token_ids


def test_samples_of_one_request_differ() -> None:
    row = np.zeros(1000, np.float32)
    assert len({sample_one(row, make_request(seed=3, index=i)) for i in range(20)}) > 15


# Bias, masks, penalties


def reference_process(row: NDArray[np.float32], request: Request) -> NDArray[np.float32]:
    params, values = request.params, row.astype(np.float64)
    output = request.token_ids[request.num_prompt_tokens :]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in range(len(row)):
        if token in request.token_ids:
            positive = values[token] > 0
            values[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    return values.astype(np.float32)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    repetition=st.sampled_from([1.0, 0.7, 1.5]),
    presence=st.sampled_from([0.0, 0.9, -1.1]),
    frequency=st.sampled_from([0.0, 0.5, -0.4]),
    biased=st.booleans(),
)
def test_penalties_are_those_of_the_definition(
    seed: int, repetition: float, presence: float, frequency: float, biased: bool
) -> None:
    chance = np.random.default_rng(seed)
    row = chance.normal(size=VOCAB).astype(np.float32) * 2
    request = make_request(
        [int(t) for t in chance.integers(0, VOCAB, 12)],
        tuple(int(t) for t in chance.integers(0, VOCAB, 9)),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={3: 4.5, 7: -100.0} if biased else {},
    )
    sampler, known = Sampler(), request.token_ids
    for length in (11, 15, len(known)):  # the history is caught up in parts
        request.token_ids = known[:length]
        processed = sampler._process(row, request)
        np.testing.assert_allclose(processed, reference_process(row, request), rtol=1e-5, atol=1e-5)
    greedy = make_request(request.token_ids[9:], request.prompt_token_ids, temperature=0)
    greedy.params = type(greedy.params)(temperature=0, repetition_penalty=repetition, presence_penalty=presence)
    assert sample_one(row, greedy) == int(reference_process(row, greedy).argmax())


def test_bias_decides() -> None:
    rows = random_rows(10)
    for row in rows:
        assert sample_one(row, make_request(logit_bias={17: 100.0})) == 17
        banned = int(row.argmax())
        assert sample_one(row, make_request(temperature=0, logit_bias={banned: -100.0})) != banned


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_what_would_stop(temperature: float) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[5], row[6], row[7] = 60, 40, 20
    sampler = Sampler(eos_token_ids=(5,))
    fields = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (6,)}
    assert sample_one(row, make_request([], **fields), sampler) == 7
    assert sample_one(row, make_request([1], **fields), sampler) == 7
    assert sample_one(row, make_request([1, 1], **fields), sampler) == 5
    assert sample_one(row, make_request([], ignore_eos=True, **fields), sampler) == 5
    assert sample_one(row, make_request([], **{**fields, "logit_bias": {6: 100.0}}), sampler) == 7


def test_ids_that_only_pad_the_vocabulary_are_never_chosen() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[30:] = 90.0
    row[8] = 5.0
    sampler = Sampler(eos_token_ids=(35,), num_generated_ids=30)
    fields: dict[str, Any] = {"min_tokens": 1, "presence_penalty": 1.0, "repetition_penalty": 1.1, "logprobs": 5}
    for extra in ({"temperature": 0}, {"top_p": 0.5}, {"logit_bias": {33: 100.0}, "temperature": 0}):
        request = make_request(prompt=(33, 2), **{**fields, **extra})
        result = sampler.sample(row[None], [request])
        assert result.token_ids == [8] and result.errors == [None]
        assert all(entry.token_id < 30 for entry in (result.logprobs[0] or []))


# Log-probabilities


def test_logprobs_are_of_the_raw_row_chosen_first() -> None:
    rows = random_rows(8, 2)
    exact = rows.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    requests = [make_request(seed=i, temperature=1.9, logprobs=4, logit_bias={9: 3.0}) for i in range(8)]
    result = Sampler().sample(rows, requests)
    for row, token, entries in zip(exact, result.token_ids, result.logprobs, strict=True):
        order = sorted(range(VOCAB), key=lambda i: (-row[i], i))
        assert entries is not None
        assert [e.token_id for e in entries] == [token, *order[:4]]
        assert [e.rank for e in entries] == [order.index(token) + 1, 1, 2, 3, 4]
        assert [e.logprob for e in entries] == pytest.approx([row[e.token_id] for e in entries], abs=1e-5)
        assert all(type(e.token_id) is int and type(e.logprob) is float for e in entries)


def test_ranks_of_equals_follow_their_ids() -> None:
    row = np.zeros(6, np.float32)
    assert [entry.rank for entry in token_logprobs(row, 4, 3)] == [5, 1, 2, 3]
    assert [entry.token_id for entry in token_logprobs(row, 4, 3)] == [4, 0, 1, 2]
    assert len(token_logprobs(row, 2, 0)) == 1
    assert len(token_logprobs(row, 2, 20)) == 7


def test_an_impossible_token_has_a_finite_logprob() -> None:
    row = np.array([0.0, -np.inf], np.float32)
    assert token_logprobs(row, 1, 0)[0].logprob == LOWEST_LOGPROB
    assert token_logprobs(np.array([3e38, -3e38], np.float32), 0, 0)[0].logprob == 0.0


def test_prompt_logprobs_read_the_row_before() -> None:
    rows = random_rows(3, 4)
    result = prompt_logprobs(rows, [5, 6, 7], 2)
    assert result == [token_logprobs(row, token, 2) for row, token in zip(rows, [5, 6, 7], strict=True)]
    rows[1, 3] = np.nan
    with pytest.raises(BadRow, match="nan"):
        prompt_logprobs(rows, [5, 6, 7], 2)


# Bad rows


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_p": 0.5, "logprobs": 2}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("fault", ["one nan", "all nan", "inf", "all masked"])
def test_a_bad_row_fails_alone(fields: dict[str, Any], fault: str) -> None:
    rows = random_rows(3)
    rows[1] = {
        "one nan": np.where(np.arange(VOCAB) == 20, np.nan, rows[1]),
        "all nan": np.full(VOCAB, np.nan),
        "inf": np.where(np.arange(VOCAB) == 20, np.inf, rows[1]),
        "all masked": np.full(VOCAB, -np.inf),
    }[fault]
    good = Sampler().sample(rows[[0, 2]], [make_request(seed=i, **fields) for i in (0, 2)])
    result = Sampler().sample(rows, [make_request(seed=i, **fields) for i in range(3)])
    assert result.token_ids == [good.token_ids[0], -1, good.token_ids[1]]
    assert result.errors[0] is None and result.errors[2] is None
    assert result.errors[1] is not None and "the model gave" in result.errors[1]
    assert result.logprobs[1] is None


def test_a_request_whose_masks_leave_nothing_fails_alone() -> None:
    rows = random_rows(2, vocab=3)
    stuck = make_request(min_tokens=1, stop_token_ids=(0, 1, 2))
    result = Sampler().sample(rows, [stuck, make_request(temperature=0)])
    assert result.token_ids[0] == -1 and "masked" in (result.errors[0] or "")
    assert result.errors[1] is None
