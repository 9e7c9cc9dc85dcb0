"""AsyncEngine on a mock model: deltas, stop strings, hang-ups, limits at the door, counters that add up, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mock_engine import EOS, MockRunner, greedy, make_core, make_engine
from tiny_tokenizers import byte_tokenizer

from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.errors import EngineBusy, EngineDead, InvalidRequest
from coterie.engine.frontend import AsyncEngine
from coterie.engine.messages import Abort, SamplingParams, ToEngine
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.observe.requests import RequestObserver, RequestSummary
from coterie.spec.errors import CoterieError

PROMPT = list(b"The quick brown")
ANSWER = bytes(greedy(PROMPT, 40)).decode()
Body = Callable[[AsyncEngine], Awaitable[None]]


def params(max_tokens: int | None = 40, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **values)


class Log(RequestObserver):
    """Keeps every event."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.first: list[float] = []
        self.gaps: list[int] = []
        self.ended: list[RequestSummary] = []

    def queued(self, prompt_tokens: int) -> None:
        self.started.append(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def token_gap(self, seconds: float, num_tokens: int) -> None:
        self.gaps.append(num_tokens)

    def finished(self, summary: RequestSummary) -> None:
        self.ended.append(summary)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Bench:
    """One engine on a thread: runs a coroutine with it, shuts it down, checks that nothing is left behind."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.log = Log()
        self.sent: list[ToEngine] = []

    def run(self, body: Body, core: EngineCore | None = None, **config: Any) -> EngineCore:
        core = core or make_core()

        async def main() -> None:
            engine = make_engine(self.folder, core, **config)
            engine.observer = self.log
            link = engine._link
            assert link is not None

            def send(message: ToEngine) -> None:
                self.sent.append(message)
                link.send(message)

            engine.connect(type(link)(send, link.join, link.kill))
            try:
                await asyncio.wait_for(body(engine), 30)
            finally:
                await asyncio.wait_for(engine.shutdown(drain=True), 30)

        asyncio.run(main())
        assert core.scheduler.pool.usage == 0 and not core.has_work
        core.check_integrity()
        assert len(self.log.started) == len(self.log.ended)
        assert len(self.log.first) == sum(summary.first_token is not None for summary in self.log.ended)
        return core

    @property
    def aborts(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Abort)]


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    yield Bench(folder)


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


def test_time_in_the_queue_and_in_prefill_add_up_to_the_first_token(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        long = engine.stream([5] * 20, params(60))
        await long.__anext__()
        await asyncio.gather(
            engine.generate([1] * 30, params(4)),
            engine.generate([2] * 12, params(4, n=3)),
            engine.generate([3] * 40, params(0, prompt_logprobs=0)),
        )
        waiting = engine.stream([4] * 9, params(4))
        task = asyncio.create_task(waiting.__anext__())
        await asyncio.sleep(0)
        await waiting.aclose()
        await asyncio.gather(task, return_exceptions=True)
        assert not long.request.is_finished  # type: ignore[union-attr]
        await long.aclose()

    core = bench.run(body, make_core(MockRunner(delay=0.004), token_budget=8, max_running=2))
    by_size = {summary.prompt_tokens: summary for summary in bench.log.ended}
    assert {size: summary.reason for size, summary in by_size.items()} == {
        20: "abort", 30: "length", 12: "length", 40: "length", 9: "abort",
    }  # fmt: skip
    for size in (20, 30, 12):
        summary = by_size[size]
        assert summary.queue is not None and summary.prefill is not None and summary.first_token is not None
        assert summary.queue + summary.prefill == pytest.approx(summary.first_token, abs=2e-3)
    assert by_size[40].first_token is None and (by_size[40].prefill or 0) > 0, "a scored prompt is computed, too"
    assert (by_size[9].queue, by_size[9].prefill) == (None, None), "cancelled while it waited"
    assert core._started == {}


def test_request_ids_are_unique_while_they_run(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate(PROMPT, params(), request_id="x"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(PROMPT, params(), request_id="x")
        assert caught.value.param == "request_id"
        assert (await task).request_id == "x"
        assert (await engine.generate(PROMPT, params(), request_id="x")).request_id == "x"

    bench.run(body)


def test_a_failed_request_is_an_error_of_its_own(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        good = asyncio.create_task(engine.generate(PROMPT, params()))
        bad = await engine.generate([1, 7], params(n=2))
        assert [choice.finish_reason for choice in bad.outputs] == ["error", "error"]
        assert "poisoned" in (bad.outputs[0].error or "")
        assert (await good).outputs[0].text == ANSWER

    bench.run(body, make_core(MockRunner(poison=frozenset({7}))))
    assert sorted(summary.reason for summary in bench.log.ended) == ["error", "length"]


def test_counters_add_up(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        outputs = await asyncio.gather(
            engine.generate(PROMPT, params()),
            engine.generate(PROMPT, params(n=3)),
            engine.generate(PROMPT, params(stop=(ANSWER[5:9],))),
            engine.generate([1, 7], params()),
            *(engine.generate(list(range(60 + i, 80 + i)), params(30)) for i in range(4)),
        )
        with pytest.raises(InvalidRequest):
            await engine.generate([], params())
        stream = engine.stream(PROMPT, params())
        await stream.__anext__()
        await stream.aclose()
        used = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        assert sum(summary.completion_tokens for summary in bench.log.ended[:-1]) == used

    core = bench.run(body, make_core(MockRunner(poison=frozenset({7})), blocks=34))
    assert core.scheduler.counters.preemptions > 0
    reasons = [summary.reason for summary in bench.log.ended]
    assert sorted(reasons) == ["abort", "error", *["length"] * 6, "stop"]
    assert sorted(bench.log.started) == sorted(summary.prompt_tokens for summary in bench.log.ended)


def test_thousands_of_tokens_in_many_streams(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        outputs = await asyncio.gather(*(engine.generate([i], params(100)) for i in range(24)))
        assert [output.outputs[0].token_ids for output in outputs] == [greedy([i], 100) for i in range(24)]

    bench.run(body, make_core(blocks=200), max_running_requests=8, max_queued_requests=16)


def test_shutdown_finishes_or_aborts(folder: Path) -> None:
    async def main(*, drain: bool) -> None:
        core = make_core(MockRunner(delay=0.005))
        engine = make_engine(folder, core)
        assert engine.is_ready() and engine.is_alive()
        task = asyncio.create_task(engine.generate(PROMPT, params()))
        await asyncio.sleep(0.02)
        stop = asyncio.create_task(engine.shutdown(drain=drain))
        await asyncio.sleep(0)
        assert not engine.is_ready()
        with pytest.raises(EngineDead):
            await engine.generate(PROMPT, params())
        await asyncio.wait_for(stop, 30)
        choice = (await task).outputs[0]
        assert choice.finish_reason == ("length" if drain else "abort")
        assert choice.text == ANSWER if drain else ANSWER.startswith(choice.text)
        await engine.shutdown(drain=drain)
        assert core.scheduler.pool.usage == 0
        assert not engine.is_alive()

    asyncio.run(main(drain=True))
    asyncio.run(main(drain=False))


def test_death_of_the_engine_reaches_every_caller(folder: Path) -> None:
    async def main() -> None:
        core = make_core(MockRunner(delay=0.002), blocks=200)
        engine = make_engine(folder, core)
        engine.observer = log = Log()
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(100))) for _ in range(3)]
        await asyncio.sleep(0.02)

        def broken(now: float) -> None:
            raise AssertionError("books do not add up")

        core.scheduler.schedule = broken  # type: ignore[assignment, method-assign]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert all(isinstance(result, EngineDead) and "books" in str(result) for result in results)
        assert not engine.is_alive() and not engine.is_ready()
        with pytest.raises(EngineDead):
            await engine.generate(PROMPT, params())
        assert [summary.reason for summary in log.ended] == ["error"] * 3
        await engine.shutdown(drain=True)

    asyncio.run(main())


def test_stats_are_there_with_the_last_piece(bench: Bench) -> None:
    async def body(engine: AsyncEngine) -> None:
        assert engine.stats() is None
        await engine.generate(PROMPT, params())
        stats = engine.stats()
        assert stats is not None and stats.generation_tokens == 40 and stats.num_running == 0

    bench.run(body)


def test_one_event_loop_after_another(folder: Path) -> None:
    engine = make_engine(folder, make_core(MockRunner(delay=0.002)))

    async def leave_open() -> None:
        stream = engine.stream(PROMPT, params(100))
        await stream.__anext__()
        engine.kept = stream  # type: ignore[attr-defined]

    async def ask() -> str:
        return (await engine.generate(PROMPT, params())).outputs[0].text

    assert asyncio.run(ask()) == ANSWER
    asyncio.run(leave_open())
    assert asyncio.run(ask()) == ANSWER
    asyncio.run(engine.shutdown(drain=True))


def test_without_a_tokenizer() -> None:
    async def body(engine: AsyncEngine) -> None:
        whole = await engine.generate(PROMPT, params(5))
        assert whole.outputs[0].text == "" and whole.outputs[0].token_ids == greedy(PROMPT, 5)
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(PROMPT, params(stop=("a",)))
        assert caught.value.param == "stop"

    Bench(None).run(body)


@pytest.mark.parametrize("own_process", [False, True])
def test_launch_on_a_real_model(tiny_folder: Path, own_process: bool) -> None:
    """The same tokens from a thread and from a process of its own."""
    config = EngineConfig(load_format="dummy", threads=1, max_model_len=64, page_size=16)

    async def main() -> list[int]:
        log = Log()
        engine = AsyncEngine.launch(str(tiny_folder), config, "tiny", own_process=own_process)
        engine.observer = log
        assert (engine.model_name, engine.max_model_len, engine.spec.vocab_size) == ("tiny", 64, 264)
        assert {choice.what for choice in engine.report} >= {"backend", "isa", "threads", "weights", "kv_cache_tokens"}
        assert engine.tokenizer is not None and engine.is_ready()
        whole = await engine.generate(engine.tokenizer.encode("Hello"), params(20))
        await asyncio.wait_for(engine.shutdown(drain=True), 30)
        assert len(log.ended) == 1 and not engine.is_alive()
        return whole.outputs[0].token_ids

    tokens = asyncio.run(main())
    assert len(tokens) == 20
    from coterie import LLM

    with LLM(tiny_folder, config=config) as llm:
        assert llm.generate("Hello", params(20))[0].outputs[0].token_ids == tokens


def test_launch_without_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"config\.json"):
        AsyncEngine.launch(str(tmp_path), EngineConfig())
