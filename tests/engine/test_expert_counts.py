"""Several ranks count each real token of each layer once, and no mixture of their options changes a number."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rank import CONFIG, PROMPTS, SPEC, TOKENS, Ranks, params

from coterie.comm.local import LocalTransport
from coterie.engine.build import build_engine
from coterie.engine.messages import Add
from coterie.engine.overlap_choice import OverlapMode
from coterie.engine.rebalance import RebalancePolicy
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.model.loader import load_weights
from coterie.model.overlap import drive
from coterie.model.shipped import shipped_model_path
from coterie.model.transformer import Runtime, Transformer
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer

RECORD = RebalancePolicy(steps=1 << 30, moves=1)
"""Counts and never moves."""
ROWS = sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS)
"""Tokens that are computed: the last one of an answer is not read."""


@pytest.fixture(scope="module")
def one() -> tuple[np.ndarray, list[list[tuple[int, float]]]]:
    """One rank: counts [L, E], and tokens with their log-probabilities."""
    core, _ = build_engine(shipped_model_path(), CONFIG, record_experts=True)
    for index, prompt in enumerate(PROMPTS):
        core.add(Add(f"p{index}", prompt, params(logprobs=2)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    said = [spoken([one for one in outputs if one.request_id == f"p{index}"]) for index in range(len(PROMPTS))]
    load = core.runner.model.runtime.load
    return load.read(), said


def spoken(outputs: list[Any]) -> list[tuple[int, float]]:
    """Every token and the log-probabilities of it and its rivals, exactly."""
    rows = [row for output in outputs for row in output.logprobs or []]
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(rows) == len(tokens) == TOKENS
    return [(token, *(entry.logprob for entry in row)) for token, row in zip(tokens, rows, strict=True)]


def test_one_rank_counts_every_token_of_every_layer(one: Any) -> None:
    counts, _ = one
    layers, moe = zip(*SPEC.moe_layers(), strict=True)
    assert counts.shape == (len(layers), moe[0].num_experts)
    assert (counts.sum(1) == ROWS * moe[0].top_k).all()


@pytest.mark.parametrize(
    ("size", "tp", "busy", "overlap"),
    [
        pytest.param(2, 1, (0, 1), "off", id="two ranks", marks=pytest.mark.slow),
        pytest.param(4, 1, (2,), "off", id="three idle ranks"),
        pytest.param(2, 2, (0,), "off", id="a tensor group"),
        pytest.param(4, 2, (0, 2), "off", id="two tensor groups", marks=pytest.mark.slow),
        pytest.param(2, 1, (0, 1), "on", id="micro-batches"),
    ],
)
def test_ranks_count_together_what_one_counts(
    size: int, tp: int, busy: tuple[int, ...], overlap: OverlapMode, one: Any
) -> None:
    """Neither idle ranks' empty rows nor the rows of others, which a rank computes, are counted again."""
    ranks = Ranks(size, None, RECORD, tp, overlap)
    ranks.form(range(size))
    for index, prompt in enumerate(PROMPTS):
        ranks.add(busy[index % len(busy)], f"p{index}", prompt)
    ranks.drain(range(size))
    each = [rank.core.runner.model.runtime.load.read() for rank in ranks.ranks]
    np.testing.assert_array_equal(sum(each), one[0])
    for rank, counts in enumerate(each):
        assert bool(counts.any()) == (rank // tp * tp in busy), "who has no tokens has no counts"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("redundant", [0, 8])
@pytest.mark.parametrize("moving", [False, True], ids=["still", "moving"])
def test_no_mixture_of_options_changes_a_log_probability(
    moving: bool, redundant: int, overlap: OverlapMode, one: Any
) -> None:
    """Shared experts are computed while rows travel in all of them."""
    policy = RebalancePolicy(steps=1, moves=6, rate=1e9) if moving else RebalancePolicy()
    ranks = Ranks(2, redundant, policy, 1, overlap)
    ranks.form(range(2))
    for turn, index in itertools.product(range(2), range(len(PROMPTS))):
        ranks.add((index + turn) % 2, f"p{index}.{turn}", PROMPTS[index], logprobs=2)
    time.sleep(0.05)
    ranks.drain(range(2))
    for turn, index in itertools.product(range(2), range(len(PROMPTS))):
        outputs = ranks.threads[(index + turn) % 2].outputs(f"p{index}.{turn}")
        assert spoken(outputs) == one[1][index]
    if moving:
        assert sum(rank.rebalancer.moved for rank in ranks.ranks if rank.rebalancer is not None) > 0


@pytest.mark.parametrize("size", [1, 65, 300])
def test_counts_of_each_layer_are_those_of_its_choices(size: int) -> None:
    """In batches of any size, against the ids that the router gave, layer by layer."""
    path = Path(shipped_model_path())
    kernels, chosen = NativeKernels(), list[np.ndarray]()
    route = kernels.route

    def watched(*given: Any) -> Any:
        found = route(*given)
        chosen.append(kernels.to_host(found.expert_ids).copy())
        return found

    kernels.route = watched  # type: ignore[method-assign]
    load = ExpertLoad([index for index, _ in SPEC.moe_layers()], 32, kernels.to_host)
    runtime = Runtime(kernels, LocalTransport(), StageTimer(), load)
    model = Transformer(SPEC, load_weights(path, SPEC, kernels).weights, runtime)
    rng = np.random.default_rng(size)
    for _ in range(2):
        ids = rng.integers(0, 4000, size).astype(np.int32)
        drive(model.stages(kernels.prepare(ForwardBatch.packed(ids, np.array([size])))))
    layers = load.read()
    assert len(chosen) == 2 * len(layers)
    for row, counts in enumerate(layers):
        both = np.concatenate([chosen[row].reshape(-1), chosen[row + len(layers)].reshape(-1)])
        np.testing.assert_array_equal(counts, np.bincount(both, minlength=32))
