"""Parity with transformers, in every way of running.

Logits: float32 within the entry's tolerance for prompts of 1, 37, 65, 129 and 300 tokens, on both backends. Greedy: 64
tokens equal the oracle's; on native whole, chunked, cached, batched and preempted runs are bit-identical (tokens and
the log-probabilities of every one). Each case must notice a mutation of its config.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import rewrite_config
from entries import ALL_CASES, MATRIX_CASES, OWN_CASES, Case
from oracle import Oracle, prompt

from coterie import LLM, SamplingParams
from coterie.engine.messages import Stats

LENGTHS = (1, 37, 65, 129, 300)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=1)
OPTIONS = {"dtype": "float32", "max_model_len": 512, "page_size": 16, "threads": 2}


def name_of(case: Case) -> str:
    return case.entry.id


cases = pytest.mark.parametrize("case", ALL_CASES, ids=name_of)
slow_own = [*MATRIX_CASES, *(pytest.param(case, marks=pytest.mark.slow, id=name_of(case)) for case in OWN_CASES)]
Get = Callable[[Case], Oracle]


@cache
def prompts(case_id: str) -> list[list[int]]:
    return [prompt(length, seed=length) for length in LENGTHS]


@cases
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_logits(case: Case, backend: str, oracle_of: Get) -> None:
    oracle = oracle_of(case)
    with LLM(oracle.folder, backend=backend, **OPTIONS) as llm:
        for token_ids in prompts(case.entry.id):
            ours = llm.logits(token_ids)
            theirs = oracle.logits(token_ids)
            assert ours.dtype == np.float32 and ours.shape == theirs.shape
            assert np.abs(theirs).max() > 1
            np.testing.assert_allclose(ours, theirs, atol=case.entry.tolerance, rtol=0)


@cases
def test_mutation_is_noticed(case: Case, oracle_of: Get, tmp_path: Path) -> None:
    oracle = oracle_of(case)
    rewrite_config(oracle.folder, tmp_path, {**case.override, **case.mutation})
    token_ids = prompts(case.entry.id)[2]
    with LLM(tmp_path, **OPTIONS) as llm:
        shift = np.abs(llm.logits(token_ids) - oracle.logits(token_ids)).max()
    assert shift > 20 * case.entry.tolerance, f"{case.mutation} moved the logits by {shift:.1e} only"


def generate(folder: Path, token_ids: list[list[int]], **options: object) -> tuple[list, Stats]:
    """Greedy (tokens, log-probabilities) per prompt, all in one call."""
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(token_ids, GREEDY)
        stats = llm.stats()
    return [(o.outputs[0].token_ids, [step[0].logprob for step in o.outputs[0].logprobs]) for o in outputs], stats


@pytest.mark.parametrize("case", slow_own, ids=name_of)
def test_greedy_equals_the_oracle_in_every_way_of_running(case: Case, oracle_of: Get) -> None:
    oracle = oracle_of(case)
    inputs = prompts(case.entry.id)
    whole = [generate(oracle.folder, [one])[0][0] for one in inputs]
    for one, (tokens, _) in zip(inputs, whole, strict=True):
        expected, margins = oracle.greedy(one, 64)
        assert_same_up_to_ties(tokens, expected, margins, case.entry.tolerance)
    for chunk in (1, 7, 64):
        assert generate(oracle.folder, inputs, chunked_prefill_size=chunk)[0] == whole, f"chunks of {chunk}"
    assert generate(oracle.folder, inputs)[0] == whole, "batched"
    assert generate(oracle.folder, inputs, enable_prefix_caching=False, page_size=64)[0] == whole, "cold, pages of 64"
    assert generate(oracle.folder, inputs, threads=1)[0] == whole, "one thread"
    preempted, stats = generate(oracle.folder, inputs[:3], max_model_len=144, kv_cache_tokens=240)
    assert stats.num_preemptions > 0
    assert preempted == whole[:3], "preempted"


@cases
def test_cached_prefix_is_bit_identical(case: Case, oracle_of: Get) -> None:
    oracle = oracle_of(case)
    longest = prompts(case.entry.id)[-1]
    with LLM(oracle.folder, **OPTIONS) as llm:
        cold = llm.generate([longest], GREEDY)[0]
        extended = [*longest, *cold.outputs[0].token_ids[:20]]
        warm = llm.generate([longest, extended], GREEDY)
        assert warm[0].num_cached_tokens >= 288 and warm[1].num_cached_tokens >= 304
    fresh = generate(oracle.folder, [longest, extended])[0]
    for ours, (tokens, logprobs) in zip(warm, fresh, strict=True):
        assert ours.outputs[0].token_ids == tokens
        assert [step[0].logprob for step in ours.outputs[0].logprobs] == logprobs


@pytest.mark.parametrize("case", MATRIX_CASES, ids=name_of)
def test_reference_greedy(case: Case, oracle_of: Get) -> None:
    oracle = oracle_of(case)
    inputs = prompts(case.entry.id)[1:3]
    results, _ = generate(oracle.folder, inputs, backend="reference", chunked_prefill_size=7)
    for one, (tokens, _) in zip(inputs, results, strict=True):
        expected, margins = oracle.greedy(one, 64)
        assert_same_up_to_ties(tokens, expected, margins, case.entry.tolerance)


def assert_same_up_to_ties(ours: list[int], expected: list[int], margins: list[float], tolerance: float) -> None:
    """Equal, or first different where the oracle itself hardly prefers its token."""
    assert len(ours) == len(expected)
    for index, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if a != b:
            assert margins[index] < tolerance, f"token {index}: {a} for {b} at a margin of {margins[index]:.1e}"
            return
