"""Ranks that are processes, over gloo on loopback: the tokens of one rank, at rest, under load and through aborts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coterie.engine import launch
from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import Launch, RunSpec, start_all
from coterie.engine.messages import SamplingParams, Stats
from coterie.engine.process import Hello, spawn
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError
from coterie.spec.parallel import ParallelConfig
from coterie.spec.weights import QuantPlan

CONFIG = EngineConfig(threads=1, kv_cache_tokens=4096, max_model_len=512, chunked_prefill_size=32, page_size=16)
PROMPTS = [[number * 11 % 4000 + 1 for number in range(start, start + 3 + 13 * start)] for start in range(7)]


def params(max_tokens: int = 16, **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **values})


async def together(engine: AsyncEngine, max_tokens: int = 16, **values: Any) -> list[list[int]]:
    """All prompts at once."""
    found = await asyncio.gather(*(engine.generate(prompt, params(max_tokens, **values)) for prompt in PROMPTS))
    return [output.outputs[0].token_ids for output in found]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    engine = AsyncEngine.launch(None, CONFIG)

    async def main() -> list[list[int]]:
        try:
            return await together(engine)
        finally:
            await engine.shutdown(drain=True)

    return asyncio.run(main())


class Running:
    """Several ranks behind a front end, on one event loop."""

    def __init__(self, path: str | None = None, config: EngineConfig = CONFIG, **layout: Any) -> None:
        self.launch = Launch(path or shipped_model_path(), config, RunSpec(parallel=ParallelConfig(**layout)))
        self.engine = AsyncEngine(self.launch.load(), "ranks")
        self.engine.connect(self.launch.start(*self.engine.callbacks()))
        self.runner = asyncio.Runner()

    def run(self, work: Callable[[AsyncEngine], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(work(self.engine))

    def close(self) -> None:
        self.runner.run(self.engine.shutdown(drain=False))
        self.runner.close()
        assert all(process.child.poll() is not None for process in self.launch.processes)

    @property
    def stats(self) -> Stats:
        found = self.engine.stats()
        assert found is not None and found.group is not None
        return found


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    running = Running(ep=2)
    yield running
    running.close()


def test_two_ranks_answer_as_one(two: Running, alone: list[list[int]]) -> None:
    assert two.run(together) == alone
    group = two.stats.group
    assert group is not None and (group.generation, group.living, group.faults) == (1, 2, 0)
    assert [rank.state for rank in group.ranks] == ["serving"] * 2
    assert all(rank.generation_tokens for rank in group.ranks), "both had requests"
    assert two.stats.generation_tokens == sum(rank.generation_tokens for rank in group.ranks)


def test_a_request_alone_and_one_with_choices(two: Running, alone: list[list[int]]) -> None:
    async def work(engine: AsyncEngine) -> None:
        assert (await engine.generate(PROMPTS[5], params())).outputs[0].token_ids == alone[5]
        several = await engine.generate(PROMPTS[5], params(n=3))
        assert [choice.token_ids for choice in several.outputs] == [alone[5]] * 3
        first = await engine.generate(PROMPTS[2], params(temperature=1.0, seed=3, n=2))
        again = await engine.generate(PROMPTS[2], params(temperature=1.0, seed=3, n=2))
        assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]

    two.run(work)


def test_aborts_in_mid_stream_and_idle_ranks_between(two: Running, alone: list[list[int]]) -> None:
    async def work(engine: AsyncEngine) -> None:
        stream = engine.stream(PROMPTS[6], params(300))
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 4:
                break
        await stream.aclose()
        await asyncio.sleep(0.3)
        before = two.stats.steps
        await asyncio.sleep(0.3)
        assert two.stats.steps == before and two.stats.num_running == 0, "idle ranks sleep"
        assert (await engine.generate(PROMPTS[1], params())).outputs[0].token_ids == alone[1]

    two.run(work)


@pytest.mark.parametrize("seed", range(2))
def test_random_arrivals(two: Running, alone: list[list[int]], seed: int) -> None:
    two.run(lambda engine: arrivals(engine, alone, seed, 12))


async def arrivals(engine: AsyncEngine, alone: list[list[int]], seed: int, count: int) -> None:
    """Requests now and then, some of them given up; whoever is not gets the right tokens."""
    rng = random.Random(seed)

    async def one(index: int, delay: float, patience: float | None) -> None:
        await asyncio.sleep(delay)
        length = rng.randrange(1, 17)
        work = engine.generate(PROMPTS[index], params(length))
        try:
            output = await asyncio.wait_for(work, patience)
        except TimeoutError:
            return
        assert output.outputs[0].token_ids == alone[index][:length]

    await asyncio.gather(
        *(
            one(rng.randrange(len(PROMPTS)), rng.uniform(0, 1.0), rng.choice([None, None, None, 0.05]))
            for _ in range(count)
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 4, "redundant_experts": 12, "nodes": 2}, {"ep": 3}])
def test_more_ranks_answer_as_one(layout: dict[str, Any], alone: list[list[int]]) -> None:
    running = Running(**layout)
    try:
        assert running.run(together) == alone
        one = running.run(lambda engine: engine.generate(PROMPTS[4], params()))
        assert one.outputs[0].token_ids == alone[4], "one request on all ranks"
        for seed in range(3):
            running.run(lambda engine, seed=seed: arrivals(engine, alone, seed, 30))  # type: ignore[misc]
    finally:
        running.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"ep": 2, "overlap": "on"}, {"ep": 4, "redundant_experts": 12, "nodes": 2}, {"dp": 2, "tp": 2}]
)
def test_rows_that_travel_narrow_answer_as_one_rank(layout: dict[str, Any]) -> None:
    """int8 rows out and bf16 outputs back, against one rank that rounds in the same place."""
    config = replace(CONFIG, quant=QuantPlan("int8"), exchange_dtype="bfloat16")

    async def one_rank() -> list[list[int]]:
        engine = AsyncEngine.launch(None, config)
        try:
            return await together(engine)
        finally:
            await engine.shutdown(drain=True)

    expected = asyncio.run(one_rank())
    running = Running(config=config, **layout)
    try:
        assert running.run(together) == expected
        running.run(lambda engine: arrivals(engine, expected, 0, 12))
    finally:
        running.close()


@pytest.mark.slow
def test_two_ranks_share_requests(alone: list[list[int]]) -> None:
    """tp 2: the first rank schedules and samples, both compute."""
    running = Running(tp=2)
    try:
        assert running.run(together) == alone
        group = running.stats.group
        assert group is not None and [bool(rank.generation_tokens) for rank in group.ranks] == [True, False]
        sampled = running.run(lambda engine: engine.generate(PROMPTS[4], params(temperature=1.0, seed=7, logprobs=2)))
        assert len(sampled.outputs[0].token_ids) == 16
    finally:
        running.close()


DENSE = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.slow
def test_two_ranks_share_a_dense_model(tmp_path: Path) -> None:
    """The tokens of one rank, and again once a lost rank is back; there are no experts to exchange."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    config = replace(CONFIG, load_format="dummy")

    async def one_rank() -> list[list[int]]:
        engine = AsyncEngine.launch(str(tmp_path), config)
        try:
            return await together(engine)
        finally:
            await engine.shutdown(drain=True)

    expected = asyncio.run(one_rank())
    running = Running(str(tmp_path), config, tp=2)
    try:
        assert running.run(together) == expected
        lost = running.launch.processes[1].child

        async def again(engine: AsyncEngine) -> list[list[int]]:
            lost.kill()
            for _ in range(600):
                await asyncio.sleep(0.1)
                group = running.stats.group
                if group is not None and group.living == 2 and group.generation > 1:
                    return await together(engine)
            raise AssertionError("the lost rank did not come back")

        assert running.run(again) == expected
    finally:
        running.runner.run(running.engine.shutdown(drain=False))
        running.runner.close()


@pytest.mark.slow
def test_a_lost_rank_takes_its_tensor_group_with_it(alone: list[list[int]]) -> None:
    """dp 2 x tp 2 with copies: the other group goes on with the requests of both, until the lost one is back."""
    running = Running(tp=2, dp=2, redundant_experts=32)
    try:
        assert running.run(together) == alone
        follower = running.launch.processes[3].child

        async def work(engine: AsyncEngine) -> list[list[int]]:
            asking = asyncio.gather(*(engine.generate(prompt, params(60)) for prompt in PROMPTS))
            await asyncio.sleep(0.5)
            follower.kill()
            return [output.outputs[0].token_ids for output in await asking]

        found = running.run(work)
        assert [tokens[:16] for tokens in found] == alone
        group = running.stats.group
        assert group is not None and group.faults == 1

        async def back(engine: AsyncEngine) -> None:
            for _ in range(600):
                await asyncio.sleep(0.1)
                await engine.generate(PROMPTS[0], params(1))
                if running.stats.group and running.stats.group.living == 4:
                    return
            raise AssertionError("the lost group did not come back")

        running.run(back)
        assert running.run(together) == alone
        for seed in range(2):
            running.run(lambda engine, seed=seed: arrivals(engine, alone, seed, 20))  # type: ignore[misc]
    finally:
        running.runner.run(running.engine.shutdown(drain=False))
        running.runner.close()


def test_a_rank_that_cannot_load_ends_all() -> None:
    open_one = partial(spawn, Hello("/nowhere", CONFIG))
    began = time.monotonic()
    with pytest.raises(CoterieError, match=r"rank \d: .*nowhere"):
        start_all([open_one, open_one])
    assert time.monotonic() - began < 30


def test_layouts_that_cannot_be_are_refused_before_a_process_starts() -> None:
    with pytest.raises(CoterieError, match=r"34 slots for 32 experts on 4 ranks"):
        AsyncEngine.launch(None, CONFIG, run=RunSpec(parallel=ParallelConfig(ep=4, redundant_experts=2)))


def test_ranks_that_the_machine_cannot_hold_are_refused_and_crowded_ones_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunSpec(parallel=ParallelConfig(ep=1024))
    monkeypatch.setattr(launch, "available_memory", lambda: 10**12)
    Launch(shipped_model_path(), CONFIG, run)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "1024 ranks share" in caplog.text
    monkeypatch.setattr(launch, "available_memory", lambda: 10**11)
    with pytest.raises(CoterieError, match=r"^1024 ranks on this machine need .* 100.00 GB can be had, enough for 5"):
        Launch(shipped_model_path(), CONFIG, run)


@pytest.mark.slow
def test_ranks_of_different_models_are_refused(tmp_path: Any) -> None:
    """The second rank finds another config in its folder: as on a machine whose files are older."""
    import shutil

    other = tmp_path / "demo"
    shutil.copytree(shipped_model_path(), other)
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x00\x3f")
    launch = Launch(shipped_model_path(), CONFIG, RunSpec(parallel=ParallelConfig(ep=2)))
    real = launch._hello

    def hello(rank: int, config: EngineConfig) -> Hello:
        made = real(rank, config)
        return made if rank == 0 else Hello(str(other), made.config, made.service, made.seat)

    launch._hello = hello  # type: ignore[method-assign,assignment]
    with pytest.raises(CoterieError, match=r"rank 1 differs from rank 0 in model: .* the same model files"):
        launch.load()
    assert all(process.child.poll() is not None for process in launch.processes)
