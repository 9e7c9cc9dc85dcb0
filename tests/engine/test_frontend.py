"""AsyncEngine on a mock model: deltas, stop strings, hang-ups, limits at the door."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frontends import ANSWER, PROMPT, Bench, params
from mock_engine import EOS, MockRunner, greedy, make_core

from coterie.engine.errors import EngineBusy, EngineDead, InvalidRequest
from coterie.engine.frontend import AsyncEngine
from coterie.engine.messages import SamplingParams
from coterie.engine.output import ChoiceDelta, PromptInfo


def test_stream_and_generate_are_the_same(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        news = [one async for one in engine.stream(PROMPT, params(logprobs=1, prompt_logprobs=0))]
        whole = await engine.generate(PROMPT, params(logprobs=1, prompt_logprobs=0))
        first, *deltas = news
        assert isinstance(first, PromptInfo) and first.num_cached_tokens == 0
        assert first.prompt_logprobs == whole.prompt_logprobs and len(whole.prompt_logprobs or []) == len(PROMPT)
        assert all(isinstance(delta, ChoiceDelta) for delta in deltas)
        choice = whole.outputs[0]
        assert "".join(delta.text for delta in deltas) == choice.text == ANSWER
        assert [t for delta in deltas for t in delta.token_ids] == choice.token_ids == greedy(PROMPT, 40)
        assert choice.logprobs is not None and [entry[0].token_id for entry in choice.logprobs] == choice.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * 39 + [
            "length"
        ] and choice.finish_reason == "length"
        assert whole.times is not None and whole.times.first_token is not None and whole.times.finished is not None
        assert whole.times.arrival <= whole.times.first_token <= whole.times.finished

    bench.run(body)
    assert bench.aborts == []


@pytest.mark.parametrize("start", [0, 7, 36])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string(bench: Bench, start: int, include: bool) -> None:
    stop = ANSWER[start : start + 4]

    async def body(engine: AsyncEngine) -> None:
        asked = params(stop=("never", stop), include_stop_str_in_output=include)
        deltas = [one async for one in engine.stream(PROMPT, asked) if isinstance(one, ChoiceDelta)]
        shown = ANSWER[: ANSWER.index(stop)] + (stop if include else "")
        assert "".join(delta.text for delta in deltas) == shown
        assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == stop
        assert sum(len(delta.token_ids) for delta in deltas) == start + 4
        whole = await engine.generate(PROMPT, asked)
        assert whole.outputs[0].text == shown and len(whole.outputs[0].token_ids) == start + 4

    bench.run(body)
    assert len(bench.aborts) == (0 if start == 36 else 2)
    assert [summary.completion_tokens for summary in bench.log.ended] == [start + 4] * 2


def test_eos_is_counted_and_is_no_text(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        whole = await engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=40))
        choice = whole.outputs[0]
        assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", EOS, ANSWER[:3])
        assert choice.token_ids == [*greedy(PROMPT, 3), EOS]

    bench.run(body, make_core(MockRunner(script={len(PROMPT) + 3: EOS})))


def test_several_choices(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        asked = SamplingParams(temperature=1.0, max_tokens=20, n=3, seed=5, prompt_logprobs=1)
        news = [one async for one in engine.stream(PROMPT, asked)]
        assert sum(isinstance(one, PromptInfo) for one in news) == 1 and isinstance(news[0], PromptInfo)
        assert len(news[0].prompt_logprobs or []) == len(PROMPT)
        texts = [
            "".join(one.text for one in news if isinstance(one, ChoiceDelta) and one.index == index)
            for index in range(3)
        ]
        assert len(set(texts)) == 3
        again = await engine.generate(PROMPT, asked)
        assert [choice.text for choice in again.outputs] == texts
        single = await engine.generate(PROMPT, msgspec.structs.replace(asked, n=1))
        assert single.outputs[0].text == texts[0]

    bench.run(body)
    assert [summary.prompt_tokens for summary in bench.log.ended] == [len(PROMPT)] * 3
    assert [summary.completion_tokens for summary in bench.log.ended] == [60, 60, 20]
    assert len(bench.log.first) == 3


def test_seeds_are_drawn_from_the_engines_seed(folder: Path) -> None:
    def texts(seed: int) -> list[str]:
        found = []

        async def body(engine: AsyncEngine) -> None:
            for _ in range(2):
                whole = await engine.generate(PROMPT, SamplingParams(max_tokens=30))
                found.append(whole.outputs[0].text)

        Bench(folder).run(body, seed=seed)
        return found

    assert texts(0) == texts(0)
    assert len({*texts(0), *texts(1)}) == 4


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_hang_up_aborts_once(bench: Bench, taken: int, count: int) -> None:
    async def body(engine: AsyncEngine) -> None:
        for _ in range(10):
            stream = engine.stream(list(range(60, 110)), params(60, n=count))
            for _ in range(taken):
                await stream.__anext__()
            await stream.aclose()
            await stream.aclose()
            assert [one async for one in stream] == []
        assert (await engine.generate(PROMPT, params())).outputs[0].text == ANSWER

    bench.run(body, make_core(MockRunner(delay=0.001), token_budget=16, blocks=200))
    assert len(bench.aborts) == len(set(bench.aborts)) == (10 * count if taken else 0)
    assert [summary.reason for summary in bench.log.ended].count("abort") == (10 if taken else 0)


def test_cancelled_and_dropped_callers_abort(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate(PROMPT, params(100)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = engine.stream(PROMPT, params(100))
        await stream.__anext__()
        del stream
        await asyncio.sleep(0)

    bench.run(body, make_core(MockRunner(delay=0.005)))
    assert len(bench.aborts) == 2


def test_a_timeout_on_one_piece_loses_nothing(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        stream, text, waits = engine.stream(PROMPT, params(8)), "", 0
        while True:
            try:
                one = await asyncio.wait_for(stream.__anext__(), 0.005)
            except TimeoutError:
                waits += 1
                continue
            except StopAsyncIteration:
                break
            text += one.text if isinstance(one, ChoiceDelta) else ""
        assert text == ANSWER[:8] and waits > 0

    bench.run(body, make_core(MockRunner(delay=0.03)))
    assert bench.aborts == []


def test_started_streams_wake_their_reader_and_give_the_same_news_as_iteration(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        iterated = [one async for one in engine.stream(PROMPT, params(12, n=2, seed=1))]
        woken = asyncio.Event()
        stream, taken = engine.stream(PROMPT, params(12, n=2, seed=1)), list[Any]()
        await stream.start(woken.set)
        assert stream.take() == [] and not stream.is_over
        while not stream.is_over:
            await asyncio.wait_for(woken.wait(), 5)
            woken.clear()
            taken += stream.take()
        assert (iterated[0], taken[0]) == (PromptInfo(), PromptInfo(12))  # the second found the first one's pages
        for index in range(2):
            of_choice = [[one for one in news[1:] if one.index == index] for news in (iterated, taken)]
            assert of_choice[0] == of_choice[1] and len(of_choice[0]) == 12
        with pytest.raises(InvalidRequest):
            await engine.stream([], params()).start(woken.set)
        closed = engine.stream(PROMPT, params(40))
        await closed.start(woken.set)
        await closed.aclose()
        assert closed.take() == []

    bench.run(body)
    assert len(bench.aborts) == 1


def test_an_engine_that_is_gone_is_said_after_the_news_that_came(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.stream(PROMPT, params(40))
        woken = asyncio.Event()
        await stream.start(woken.set)
        await asyncio.wait_for(woken.wait(), 5)
        engine._tracker.fail_all("it is gone")
        assert not stream.is_over
        assert stream.take()
        for _ in range(2):
            with pytest.raises(EngineDead, match="it is gone"):
                stream.take()
        assert not stream.is_over

    bench.run(body)


def test_prompts_over_the_limit_are_refused_and_the_next_is_served(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        for length, asked in ((128, 1), (129, 1), (10**5, 1), (128, None), (127, 2), (3, 10**6)):
            with pytest.raises(InvalidRequest) as caught:
                await engine.generate([65] * length, params(asked))
            assert "128" in str(caught.value) and str(length) in str(caught.value)
            assert (await engine.generate(PROMPT, params())).outputs[0].text == ANSWER
        whole = await engine.generate([65] * 127, params(1))
        assert len(whole.outputs[0].token_ids) == 1
        whole = await engine.generate([65] * 100, params(None))
        assert len(whole.outputs[0].token_ids) == 28 and whole.outputs[0].finish_reason == "length"

    bench.run(body, make_core(blocks=64))
    assert len(bench.log.ended) == 8


@pytest.mark.parametrize(("prompt", "asked"), [([-1], {}), ([260], {}), ([2**32], {}), ([], {}), ([True], {})])
def test_bad_token_ids_are_refused(bench: Bench, prompt: list[int], asked: dict) -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest):
            await engine.generate(prompt, params(**asked))
        assert (await engine.generate(PROMPT, params())).outputs[0].text == ANSWER

    bench.run(body)


def test_scores_without_an_answer(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        whole = await engine.generate([65] * 128, params(0, prompt_logprobs=1))
        assert len(whole.prompt_logprobs or []) == 128
        assert (whole.outputs[0].token_ids, whole.outputs[0].finish_reason) == ([], "length")

    bench.run(body)


def test_the_queue_is_bounded(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(20))) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy) as caught:
            await engine.generate(PROMPT, params(20))
        assert 1 <= caught.value.retry_after <= 60
        with pytest.raises(EngineBusy):
            await engine.generate(PROMPT, params(20, n=6))
        with pytest.raises(InvalidRequest, match="n=7 is more than the 6 sequences") as never:
            await engine.generate(PROMPT, params(20, n=7))
        assert never.value.param == "n", "it can never fit, so it must not be told to come back"
        await asyncio.gather(*tasks)
        await engine.generate(PROMPT, params(20))
        assert len((await engine.generate(PROMPT, params(20, n=6))).outputs) == 6

    bench.run(body, make_core(max_running=2), max_running_requests=2, max_queued_requests=4)
    assert len(bench.log.ended) == 8
