"""Service classes on real engines: equal texts under any mix with evictions; isolation on the shipped model, in steps.

Time is not asserted; `coterie bench serve` measures it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coterie.engine.build import build_engine
from coterie.engine.classes import CLASS_NAMES
from coterie.engine.config import NO_CLASSES, EngineConfig, ServiceConfig
from coterie.engine.core import EngineCore
from coterie.engine.messages import Add, Output, SamplingParams
from coterie.model.shipped import shipped_model_path

ON = ServiceConfig(enabled=True, slo_seconds=(0.001, 0.002, 60.0))


def built(source: str | Path, service: ServiceConfig, **config: int | str) -> EngineCore:
    settings = EngineConfig(**{"threads": 1, "page_size": 4, "chunked_prefill_size": 24} | config)  # type: ignore[arg-type]
    return build_engine(source, settings, service=service)[0]


def adds(count: int, seed: int) -> list[Add]:
    """Requests with shared beginnings; greedy and sampled, with log-probabilities."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [chance.randrange(4) + 65] * chance.choice([4, 9, 30]) + [chance.randrange(97, 120)]
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]), seed=i, max_tokens=10, ignore_eos=True, logprobs=2
        )
        made.append(Add(f"{i}", prompt, params, service_class=chance.choice(CLASS_NAMES)))
    return made


def answers(core: EngineCore, requests: list[Add], seed: int) -> dict[str, list[object]]:
    """What each request got: tokens and log-probabilities, bit for bit."""
    chance, todo, found = random.Random(seed), list(reversed(requests)), dict[str, list[object]]()
    while todo or core.has_work:
        while todo and (not core.has_work or chance.random() < 0.6):
            core.add(todo.pop())
        for output in core.step():
            assert isinstance(output, Output) and output.error is None
            found.setdefault(output.request_id, []).append((output.token_ids, output.logprobs))
        core.check_integrity()
    return found


def test_equal_texts_on_a_real_model_under_any_mix_with_evictions(tiny_folder: Path) -> None:
    requests = adds(150, 1)
    small = {"load_format": "dummy", "max_running_requests": 6}
    plain = answers(built(tiny_folder, NO_CLASSES, **small), requests, 2)
    core = built(tiny_folder, ON, kv_cache_tokens=96, max_model_len=96, **small)
    assert answers(core, requests, 3) == plain
    assert sum(counters.evictions for counters in core.scheduler.shares.counters) > 3, "nobody was evicted"


@pytest.mark.slow
def test_isolate_gold_rides_beside_endless_bronze_on_the_shipped_model() -> None:
    """Gold's first tokens and gaps, counted in steps, are those it has alone; steps are full all the while."""
    service = ServiceConfig(enabled=True)
    limits = {"chunked_prefill_size": 64, "max_running_requests": 16, "page_size": 16}

    def gold_steps(core: EngineCore, bronze: int) -> tuple[list[int], list[int], float]:
        chance = random.Random(5)
        prompt = [chance.randrange(300, 900) for _ in range(24)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        first, gaps, filled, steps = [], [], 0, 0
        born: dict[str, int] = {}
        last: dict[str, int] = {}
        for steps in range(1, 241):
            if steps % 12 == 0:
                born[f"g{steps}"] = steps
                core.add(Add(f"g{steps}", [*prompt[:-1], steps], params, service_class="gold"))
            while core.scheduler.num_of_class(2)[1] < bronze:
                name = f"b{steps}.{core.scheduler.num_waiting}"
                core.add(Add(name, [chance.randrange(300, 900) for _ in range(24)], params, service_class="bronze"))
            for output in core.step():
                name = output.request_id
                if name in born:
                    (gaps if name in last else first).append(steps - last.get(name, born[name]))
                    last[name] = steps
        counters = core.scheduler.shares.counters
        filled = sum(one.prompt_tokens + one.decode_tokens for one in counters)
        core.abort_all()
        return first, gaps, filled / steps

    path = shipped_model_path()
    alone = gold_steps(built(path, service, **limits), 0)
    both = gold_steps(built(path, service, **limits), 20)
    assert max(both[0]) <= 2 and both[0] == alone[0] and both[1] == alone[1]
    assert both[2] > 0.9 * 64, "bronze fills what gold leaves"
