"""LLM: the Python API on the mock model, and on a tiny random DeepSeek-V3-style model with both backends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_engine import MockRunner, greedy, logits_after, make_core, make_llm
from tiny_tokenizers import byte_tokenizer

from coterie import LLM, SamplingParams
from coterie.engine.config import OPTION_NAMES
from coterie.engine.errors import InvalidRequest
from coterie.engine.llm import EngineOptions
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.spec.errors import CoterieError

PROMPT = list(b"The quick brown")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
TINY: Any = {"load_format": "dummy", "threads": 1, "max_model_len": 128, "page_size": 16}


def test_options_are_the_config() -> None:
    assert set(EngineOptions.__annotations__) == OPTION_NAMES


def test_text_and_ids_one_and_many(tmp_path: Path) -> None:
    with make_llm(byte_tokenizer(tmp_path), make_core()) as llm:
        text = bytes(greedy(PROMPT, 20)).decode()
        (by_text,) = llm.generate("The quick brown", GREEDY)
        assert by_text.prompt == "The quick brown" and by_text.prompt_token_ids == PROMPT
        assert by_text.outputs[0].text == text and by_text.outputs[0].token_ids == greedy(PROMPT, 20)
        for prompts in (PROMPT, np.array(PROMPT), [PROMPT], [np.array(PROMPT)], ("The quick brown",)):
            assert [output.outputs[0].text for output in llm.generate(prompts, GREEDY)] == [text]  # type: ignore[arg-type]
        many = llm.generate(["A", [66], "C"], [GREEDY, SamplingParams(max_tokens=2, temperature=0.0), GREEDY])
        assert [output.outputs[0].token_ids for output in many] == [greedy([65], 20), greedy([66], 2), greedy([67], 20)]
        assert llm.generate([], GREEDY) == []
        llm.check_integrity()


def test_more_prompts_than_the_queue_holds() -> None:
    llm = make_llm(None, make_core(), max_running_requests=2, max_queued_requests=1)
    outputs = llm.generate([[i] for i in range(20)], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [greedy([i], 20) for i in range(20)]
    (three,) = llm.generate([1, 2], SamplingParams(n=3, max_tokens=4, temperature=0.0))
    assert [choice.token_ids for choice in three.outputs] == [greedy([1, 2], 4)] * 3


def test_stop_strings_end_the_computation(tmp_path: Path) -> None:
    runner = MockRunner()
    llm = make_llm(byte_tokenizer(tmp_path), make_core(runner))
    answer = bytes(greedy(PROMPT, 20)).decode()
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=100, stop=(answer[4:7],)))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (answer[:4], "stop")
    assert len(runner.batches) == 7 and not llm.generate([], GREEDY)


def test_nothing_runs_if_one_prompt_is_refused() -> None:
    runner = MockRunner()
    llm = make_llm(None, make_core(runner))
    with pytest.raises(InvalidRequest, match="999"):
        llm.generate([[1], [999]], GREEDY)
    with pytest.raises(CoterieError, match="give one"):
        llm.generate([[1], [2]], [GREEDY])
    with pytest.raises(CoterieError, match=r"tokenizer\.json"):
        llm.generate("text", GREEDY)
    assert runner.batches == []


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    runner = MockRunner()
    core = make_core(runner)
    llm = make_llm(None, core)
    run = runner.run

    def interrupt(batch: Any, *, micro_batches: int = 1) -> Any:
        raise KeyboardInterrupt

    runner.run = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY)
    runner.run = run  # type: ignore[method-assign]
    assert not core.scheduler.has_work and core.scheduler.pool.usage == 0
    assert llm.generate([1], GREEDY)[0].outputs[0].token_ids == greedy([1], 20)
    llm.check_integrity()


def test_streams_and_calls_together(tmp_path: Path) -> None:
    llm = make_llm(byte_tokenizer(tmp_path), make_core(MockRunner(delay=0.001)))

    async def one(prompt: list[int]) -> str:
        news = [value async for value in llm.stream(prompt, GREEDY)]
        assert isinstance(news[0], PromptInfo)
        return "".join(value.text for value in news if isinstance(value, ChoiceDelta))

    async def main() -> list[str]:
        called: list[Any] = []
        thread = threading.Thread(target=lambda: called.extend(llm.generate([[i] for i in range(5)], GREEDY)))
        thread.start()
        texts = await asyncio.gather(*(one([65 + i]) for i in range(4)))
        await asyncio.to_thread(thread.join)
        assert [output.outputs[0].token_ids for output in called] == [greedy([i], 20) for i in range(5)]
        stream = llm.stream(PROMPT, GREEDY)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        return texts

    assert asyncio.run(main()) == [bytes(greedy([65 + i], 20)).decode() for i in range(4)]
    assert llm.stats().num_running == 0 and llm.stats().kv_usage == 0
    llm.check_integrity()


def test_logits_of_the_mock() -> None:
    llm = make_llm(None, make_core(token_budget=7))
    prompt = list(range(40, 60))
    rows = llm.logits(prompt)
    assert rows.dtype == np.float32 and rows.flags.writeable
    np.testing.assert_array_equal(rows, np.stack([logits_after(prompt[: i + 1]) for i in range(20)]))
    failing = make_llm(None, make_core(MockRunner(poison=frozenset({7}))))
    with pytest.raises(CoterieError, match="poisoned row"):
        failing.logits([1, 7])


def test_logits_of_a_text_and_of_a_prompt_that_fills_the_context(tmp_path: Path) -> None:
    llm = make_llm(byte_tokenizer(tmp_path, add_bos_token=True), make_core())
    np.testing.assert_array_equal(llm.logits("é"), llm.logits([256, *"é".encode()]))
    longest = llm.max_model_len
    assert len(llm.logits([1] * longest)) == longest
    with pytest.raises(InvalidRequest, match=f"at most {longest} tokens"):
        llm.logits([1] * (longest + 1))


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"bytes", bytearray(b"x"), {"a": 1}, ["a", 5], [[1], None], [b"a"]])
def test_what_is_no_prompt_is_refused_with_what_is(tmp_path: Path, prompt: Any) -> None:
    llm = make_llm(byte_tokenizer(tmp_path), make_core())
    with pytest.raises(InvalidRequest, match="a prompt is a text or a sequence of token ids, not ") as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.param == "prompt"


def test_what_is_wrong_with_the_options_is_said_before_weights_are_looked_for(tiny_folder: Path) -> None:
    with pytest.raises(CoterieError, match="beyond the model's"):
        LLM(tiny_folder, max_model_len=10**6)
    with pytest.raises(CoterieError, match="mem_fraction_static"):
        LLM(tiny_folder, mem_fraction_static=float("nan"))
    with pytest.raises(CoterieError, match="threads=5000"):
        LLM(tiny_folder, threads=5000)


def test_closed() -> None:
    llm = make_llm(None, make_core())
    with llm:
        llm.generate([1], GREEDY)
    with pytest.raises(CoterieError, match="closed"):
        llm.generate([1], GREEDY)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_real_model_in_every_way_of_running(tiny_folder: Path, backend: Any) -> None:
    prompts = [list(range(1, 60)), [5, 6, 7], list(range(100, 140))]
    with LLM(tiny_folder, backend=backend, **TINY) as llm:
        whole = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
        rows = llm.logits(prompts[0])
        assert rows.shape == (59, 264) and int(rows[-1].argmax()) == whole[0][0]
        warm = llm.generate(prompts, GREEDY)
        assert [output.num_cached_tokens for output in warm] == [48, 0, 32]
        assert [output.outputs[0].token_ids for output in warm] == whole
        assert all(token < 258 for output in warm for token in output.outputs[0].token_ids), "ids past the tokenizer"
        assert sum(llm.stage_seconds().values()) > 0 and llm.stage_seconds()["experts"] > 0
        assert llm.generate("Hi", GREEDY)[0].prompt_token_ids == list(b"Hi")
        llm.check_integrity()
    for options in ({"chunked_prefill_size": 7}, {"kv_cache_tokens": 128}, {"enable_prefix_caching": False}):
        with LLM(tiny_folder, backend=backend, **{**TINY, **options}) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == whole
            np.testing.assert_allclose(llm.logits(prompts[0]), rows, atol=1e-5)
            if backend == "native":
                np.testing.assert_array_equal(llm.logits(prompts[0]), rows)
            assert llm.stats().kv_usage == 0


def test_backends_agree(tiny_config: dict[str, Any]) -> None:
    prompt = list(range(1, 40))
    rows = []
    for backend in ("native", "reference"):
        with LLM(tiny_config, backend=backend, **TINY) as llm:  # type: ignore[arg-type]
            rows.append(llm.logits(prompt))
            assert llm.tokenizer is None and llm.spec.num_parameters > 0
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-4)


def test_weights_are_needed_unless_dummy(tiny_folder: Path, tiny_config: dict[str, Any]) -> None:
    with pytest.raises(CoterieError):
        LLM(tiny_folder, threads=1)
    with pytest.raises(CoterieError, match="dummy"):
        LLM(tiny_config, threads=1)
    with pytest.raises(CoterieError, match=r"config\.json"):
        LLM(tiny_folder / "nowhere")
