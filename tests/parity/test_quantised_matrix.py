"""Quantised experts on the parity models: greedy output bit-identical in every way of running, on every ISA level.

Formats int8 (groups of 128), int4 and MXFP4 (groups of 32), attention int8 as well. Every format meets every level,
and every model every format. Against the reference backend with the dequantised experts, logits differ by the int8
rounding of the experts' inputs: within TOLERANCE of their size in the median row (4 bits alone shift them by 0.15 to
0.4; a row whose router then chooses otherwise lies further).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from entries import MATRIX_CASES, Case
from oracle import Oracle, prompt
from test_parity import OPTIONS, name_of

from coterie import LLM, SamplingParams
from coterie.engine.messages import Stats
from coterie.kernels.machine import machine

TOLERANCE = 0.05
LENGTHS = (1, 37, 65, 129, 300)
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=1)
FORMATS: dict[str, Any] = {
    "int8": {"experts": "int8", "group": 128, "attention": "int8"},
    "int4": {"experts": "int4", "group": 32, "attention": "int8"},
    "mxfp4": {"experts": "mxfp4", "group": 32},
}
ISAS = machine().isa_levels
Get = Callable[[Case], Oracle]


def plan() -> list[Any]:
    """(case, format, level): a Latin square over the cases, and the second case with every level."""
    out = []
    for row, case in enumerate(MATRIX_CASES):
        for column, name in enumerate(FORMATS):
            for number, isa in enumerate(ISAS):
                if row == 1 or (row + column) % len(ISAS) == number:
                    out.append(pytest.param(case, name, isa, id=f"{case.entry.id}-{name}-{isa}"))
    return out


def generate(oracle: Oracle, inputs: list[list[int]], **options: Any) -> tuple[list[Any], Stats]:
    """Greedy (tokens, log-probabilities) per prompt, all in one call."""
    with LLM(oracle.folder, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(inputs, GREEDY)
        stats = llm.stats()
    return [(o.outputs[0].token_ids, [step[0].logprob for step in o.outputs[0].logprobs]) for o in outputs], stats


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "isa"), plan())
def test_greedy_is_bit_identical_in_every_way_of_running(case: Case, name: str, isa: str, oracle_of: Get) -> None:
    oracle, how = oracle_of(case), {**FORMATS[name], "isa": isa}
    whole = [generate(oracle, [one], **how)[0][0] for one in PROMPTS]
    assert len({tuple(tokens) for tokens, _ in whole}) > 1, "every prompt ends alike: nothing is tested"
    for chunk in (7, 64):
        assert generate(oracle, PROMPTS, chunked_prefill_size=chunk, **how)[0] == whole, f"chunks of {chunk}"
    assert generate(oracle, PROMPTS, **how)[0] == whole, "batched"
    assert generate(oracle, PROMPTS, threads=1, **how)[0] == whole, "one thread"
    assert generate(oracle, PROMPTS, threads=3, enable_prefix_caching=False, **how)[0] == whole, "three threads, cold"
    preempted, stats = generate(oracle, PROMPTS[:3], max_model_len=144, kv_cache_tokens=240, **how)
    assert stats.num_preemptions > 0
    assert preempted == whole[:3], "preempted"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", MATRIX_CASES, ids=name_of)
def test_logits_are_those_of_the_dequantised_weights(case: Case, name: str, oracle_of: Get) -> None:
    oracle = oracle_of(case)
    how = {**OPTIONS, **FORMATS[name], "attention": "auto"}
    with LLM(oracle.folder, **how) as native, LLM(oracle.folder, backend="reference", **how) as reference:
        for token_ids in PROMPTS[1:4]:
            ours, theirs = native.logits(token_ids), reference.logits(token_ids)
            errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
            assert 0 < np.median(errors) < TOLERANCE, f"median {np.median(errors):.3f}, worst {errors.max():.3f}"
