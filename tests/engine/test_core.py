"""EngineCore on a mock model: outputs, failures that stay with their request, prompt rows, counters."""

from __future__ import annotations

import numpy as np
import pytest
from mock_engine import EOS, VOCAB, MockRunner, greedy, logits_after, make_add, make_core

from coterie.engine.core import EngineCore
from coterie.engine.messages import Output


def run(core: EngineCore, limit: int = 500) -> dict[str, list[Output]]:
    """Step until idle; outputs by request."""
    found: dict[str, list[Output]] = {}
    for _ in range(limit):
        if not core.has_work:
            core.check_integrity()
            assert core.scheduler.pool.usage == 0
            return found
        for output in core.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


PROMPTS = {"a": [97, 98, 99], "b": list(range(60, 100)), "c": [5], "d": list(range(30, 47))}


@pytest.mark.parametrize("token_budget", [1, 7, 32, 200])
@pytest.mark.parametrize("blocks", [20, 64])
def test_outputs_do_not_depend_on_batches_or_preemption(token_budget: int, blocks: int) -> None:
    core = make_core(token_budget=token_budget, blocks=blocks)
    for name, prompt in PROMPTS.items():
        core.add(make_add(name, prompt, 30))
    found = run(core)
    for name, prompt in PROMPTS.items():
        assert tokens(found[name]) == greedy(prompt, 30)
        assert [output.finish_reason for output in found[name]] == [None] * 29 + ["length"]
    stats = core.stats()
    assert stats.generation_tokens == 120 and stats.prompt_tokens == sum(map(len, PROMPTS.values()))
    assert (stats.num_preemptions > 0) == (blocks == 20)


def test_eos_and_stop_tokens_end_a_sequence() -> None:
    core = make_core(MockRunner(script={5: EOS, 4: 120}))
    core.add(make_add("eos", [1, 2, 3], ignore_eos=False))
    core.add(make_add("ignored", [1, 2, 3]))
    core.add(make_add("stop", [1, 2, 3], stop_token_ids=(120,)))
    found = run(core)
    assert tokens(found["eos"])[1:] == [120, EOS]
    assert (found["eos"][-1].finish_reason, found["eos"][-1].stop_token_id) == ("stop", EOS)
    assert len(tokens(found["ignored"])) == 6 and found["ignored"][-1].finish_reason == "length"
    assert (found["stop"][-1].finish_reason, found["stop"][-1].stop_token_id) == ("stop", 120)


def test_the_context_is_the_cap_without_max_tokens() -> None:
    core = make_core(max_model_len=16)
    core.add(make_add("a", [1, 2, 3], max_tokens=None))  # type: ignore[arg-type]
    assert len(tokens(run(core)["a"])) == 13


def test_poison_fails_alone() -> None:
    core = make_core(MockRunner(poison=frozenset({7})))
    core.add(make_add("good", [97, 98, 99]))
    core.step()
    core.add(make_add("bad", [1, 7, 3]))
    core.add(make_add("late", [4, 5]))
    found = run(core)
    assert tokens(found["late"]) == greedy([4, 5], 6)
    assert tokens(found["good"]) == greedy([97, 98, 99], 6)[1:]
    assert len(found["bad"]) == 1
    assert found["bad"][0].finish_reason == "error" and "poisoned row" in (found["bad"][0].error or "")


def test_poison_alone_in_its_step_is_not_run_twice() -> None:
    runner = MockRunner(poison=frozenset({7}))
    core = make_core(runner)
    core.add(make_add("bad", [7]))
    assert run(core)["bad"][0].finish_reason == "error"
    assert len(runner.batches) == 1


def test_poisoned_pages_are_not_reused() -> None:
    runner = MockRunner(rotten=frozenset({7}))
    core = make_core(runner)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    core.add(make_add("bad", prompt))
    assert run(core)["bad"][-1].finish_reason == "error"
    runner.rotten = frozenset()
    core.add(make_add("again", prompt))
    found = run(core)
    assert tokens(found["again"]) == greedy(prompt, 6) and found["again"][0].num_cached_tokens == 0


def test_a_row_that_is_not_a_number_fails_its_request_only() -> None:
    core = make_core(MockRunner(rotten=frozenset({7})))
    core.add(make_add("bad", [7, 1]))
    core.add(make_add("scored", [7, 1], prompt_logprobs=1))
    core.add(make_add("good", [1, 2]))
    found = run(core)
    assert tokens(found["good"]) == greedy([1, 2], 6)
    for name in ("bad", "scored"):
        assert [output.finish_reason for output in found[name]] == ["error"] and "nan" in (found[name][0].error or "")


def test_a_request_that_cannot_run_is_refused_alone() -> None:
    core = make_core(blocks=2, max_model_len=1000)
    core.add(make_add("large", range(40)))
    core.add(make_add("small", [1, 2], 3))
    core.add(make_add("small", [1, 2], 3))
    found = run(core)
    assert found["large"][0].finish_reason == "error" and "40" in (found["large"][0].error or "")
    assert tokens(found["small"]) == greedy([1, 2], 3)
    assert sum("in use" in (output.error or "") for output in found["small"]) == 1


def expected_logprob(prompt: list[int], position: int) -> float:
    row = logits_after(prompt[:position]).astype(np.float64)
    return float(row[prompt[position]] - np.log(np.exp(row).sum()))


@pytest.mark.parametrize("token_budget", [1, 7, 64])
@pytest.mark.parametrize("blocks", [13, 64])
def test_prompt_rows_across_chunks_and_preemption(token_budget: int, blocks: int) -> None:
    core = make_core(token_budget=token_budget, blocks=blocks)
    prompt = list(range(60, 90))
    core.add(make_add("first", list(range(100, 115)), 20))
    core.add(make_add("scored", prompt, 8, prompt_logprobs=2))
    core.add(make_add("twice", prompt, 8, prompt_logprobs=0))
    found = run(core)
    for name, width in (("scored", 3), ("twice", 1)):
        assert [output.prompt_logprobs is not None for output in found[name]] == [True] + [False] * 7
        entries = found[name][0].prompt_logprobs
        assert entries is not None and entries[0] is None and len(entries) == len(prompt)
        for position, entry in enumerate(entries[1:], start=1):
            assert entry is not None and len(entry) == width and entry[0].token_id == prompt[position]
            assert entry[0].logprob == pytest.approx(expected_logprob(prompt, position), abs=1e-4)
        assert tokens(found[name]) == greedy(prompt, 8)


def test_logits_of_a_prompt() -> None:
    core = make_core(token_budget=7, max_model_len=20)
    prompt = list(range(40, 60))
    add = make_add("a", prompt, 0)
    core.add(type(add)(add.request_id, add.prompt_token_ids, add.params, want_logits=True))
    (output,) = run(core)["a"]
    assert output.finish_reason == "length" and output.token_ids == [] and output.logits is not None
    rows = np.frombuffer(output.logits, np.float32).reshape(20, VOCAB)
    np.testing.assert_array_equal(rows, np.stack([logits_after(prompt[: i + 1]) for i in range(20)]))


def test_logprobs_come_with_their_tokens() -> None:
    core = make_core()
    core.add(make_add("a", [97, 98], 5, logprobs=2))
    outputs = run(core)["a"]
    for output in outputs:
        assert output.logprobs is not None
        assert [entry[0].token_id for entry in output.logprobs] == output.token_ids
        assert len(output.logprobs[0]) == 3


def test_cached_prompts_are_told() -> None:
    core = make_core()
    prompt = list(range(40, 60))
    core.add(make_add("cold", prompt))
    assert run(core)["cold"][0].num_cached_tokens == 0
    core.add(make_add("warm", prompt))
    outputs = run(core)["warm"]
    assert outputs[0].num_cached_tokens == 16 and tokens(outputs) == greedy(prompt, 6)
    assert core.stats().prefix_hits == 16


def test_prefill_is_timed_once_from_the_first_chunk_whatever_comes_between() -> None:
    core = make_core(token_budget=7, blocks=20)
    for name, prompt in PROMPTS.items():
        core.add(make_add(name, prompt, 30))
    core.add(make_add("scored", [1, 2, 3], 0, prompt_logprobs=0))
    core.add(make_add("gone", list(range(100, 140)), 30))
    said = {output.request_id: [output] for output in core.step()}
    core.abort("gone")
    found = {name: [*said.get(name, []), *outputs] for name, outputs in run(core).items()}
    assert core.stats().num_preemptions > 0
    for name, outputs in found.items():
        timed = [output.prefill_seconds is not None for output in outputs]
        assert timed == [name != "gone", *[False] * (len(outputs) - 1)], name
        assert name == "gone" or (outputs[0].prefill_seconds or 0) > 0


def test_abort_frees_at_once_and_is_idempotent() -> None:
    core = make_core(token_budget=4)
    core.add(make_add("a", range(40)))
    core.add(make_add("b", range(50, 60)))
    core.step()
    for name in ("a", "b", "a", "unknown"):
        core.abort(name)
    assert not core.scheduler.has_work and core.scheduler.pool.usage == 0
    assert {o.request_id: o.finish_reason for o in core.step()} == {"a": "abort", "b": "abort"}
    assert run(core) == {}


def test_stages_are_timed() -> None:
    core = make_core()
    core.add(make_add("a", [1, 2, 3]))
    run(core)
    seconds = core.stats().stage_seconds
    assert seconds["sample"] > 0 and seconds["other"] > 0 and core.stats().steps == 6
