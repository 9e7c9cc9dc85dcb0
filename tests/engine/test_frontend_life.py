"""AsyncEngine on a mock model: times and counters that add up, failures, shutdown, launch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from frontends import ANSWER, PROMPT, Bench, Log, params
from mock_engine import MockRunner, greedy, make_core, make_engine

from coterie.engine.config import EngineConfig
from coterie.engine.errors import EngineDead, InvalidRequest
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import RunSpec
from coterie.spec.errors import CoterieError


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
        engine = AsyncEngine.launch(str(tiny_folder), config, "tiny", RunSpec(own_process=own_process))
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
