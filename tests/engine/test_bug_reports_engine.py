"""Bug reports E3, F3, F4 and H2 replayed through the whole engine on a tiny random model.

E3: the same prompt gives the same ids whatever it rides with. F3: a prompt over several forward passes equals one pass.
F4: a long prompt does not stop running streams, counted in steps. H2: nothing spins once the answer is out. Native
promises bits, so bits are compared.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import LLM, SamplingParams
from coterie.engine.build import build_engine
from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.messages import Add, Output
from coterie.engine.output import RequestOutput

PAGE = 16
TINY: Any = {"load_format": "dummy", "threads": 1, "max_model_len": 256, "page_size": PAGE}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)


def ids(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng(1000 * salt + length).integers(1, 256, length).tolist()


SUBJECT = ids(45)


def answer(output: RequestOutput) -> tuple[list[int], list[Any]]:
    """Tokens and every log-probability: equal only if the logits were equal bit for bit."""
    (choice,) = output.outputs
    return choice.token_ids, choice.logprobs or []


# E3


def company(size: int) -> list[list[int]]:
    """Other prompts of many lengths; some begin as the subject does."""
    return [ids(5 + 13 * i % 90, i) if i % 3 else [*SUBJECT[: 10 + 2 * i], *ids(9, i)] for i in range(size)]


@pytest.mark.parametrize(
    ("params", "dtype"),
    [(GREEDY, "float32"), (GREEDY, "bfloat16"), (SEEDED, "float32")],
    ids=["greedy", "greedy-bf16", "seeded"],
)
@pytest.mark.parametrize("chunk", [512, 24], ids=["whole", "chunked"])
@pytest.mark.parametrize("caching", [False, True], ids=["cold", "cached"])
def test_e3_the_answer_does_not_depend_on_the_company(
    tiny_folder: Path, params: SamplingParams, dtype: Any, chunk: int, caching: bool
) -> None:
    with LLM(tiny_folder, **TINY, dtype=dtype) as llm:
        alone = answer(llm.generate(SUBJECT, params)[0])
    with LLM(tiny_folder, **TINY, dtype=dtype, chunked_prefill_size=chunk, enable_prefix_caching=caching) as llm:
        assert answer(llm.generate(SUBJECT, params)[0]) == alone
        hits = 0
        for size in (2, 7, 16):
            others = company(size - 1)
            for position in range(size):
                prompts = [*others[:position], SUBJECT, *others[position:]]
                output = llm.generate(prompts, params)[position]
                assert answer(output) == alone, f"place {position} of {size}"
                hits += output.num_cached_tokens > 0
        assert hits == (25 if caching else 0)
        llm.check_integrity()


def test_e3_the_company_may_sample_be_scored_or_have_many_choices(tiny_folder: Path) -> None:
    others = [
        SamplingParams(temperature=1.5, top_p=0.9, max_tokens=20, ignore_eos=True, n=3),
        SamplingParams(max_tokens=0, prompt_logprobs=2),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={5: 50.0}, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=1),
    ]
    with LLM(tiny_folder, **TINY) as llm:
        alone = answer(llm.generate(SUBJECT, GREEDY)[0])
        scored = llm.generate(ids(30, 1), others[1])[0].prompt_logprobs
        together = llm.generate([SUBJECT, *(ids(30, i) for i in range(4))], [GREEDY, *others])
        assert answer(together[0]) == alone
        assert together[2].prompt_logprobs == scored


# F3


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_f3_a_prompt_over_several_passes_equals_one_pass(tiny_folder: Path, backend: Any, dtype: Any) -> None:
    prompt = ids(100)
    with LLM(tiny_folder, backend=backend, **TINY, dtype=dtype) as llm:
        rows, one_pass = llm.logits(prompt), answer(llm.generate(prompt, GREEDY)[0])
    assert np.isfinite(rows).all()
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for chunk in (1, 7, 16, 64, 99, 100, 101):
        with LLM(tiny_folder, backend=backend, **TINY, dtype=dtype, chunked_prefill_size=chunk) as llm:
            chunked = answer(llm.generate(prompt, GREEDY)[0])
            again = llm.logits(prompt)
            assert llm.stats().steps >= -(-100 // chunk)
        if backend == "native":
            np.testing.assert_array_equal(again, rows)
            assert chunked == one_pass, f"chunks of {chunk}"
        else:
            np.testing.assert_allclose(again, rows, atol=tolerance)
            assert chunked[0] == one_pass[0], f"chunks of {chunk}"


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("shared", [64, 70, 79, 96, 100])
def test_f3_a_prefix_hit_that_ends_inside_a_block(tiny_folder: Path, shared: int, chunk: int) -> None:
    """The cache holds another prompt that agrees on `shared` tokens: only whole pages of them may be taken."""
    prompt = ids(100)
    with LLM(tiny_folder, **TINY, enable_prefix_caching=False) as llm:
        cold, whole_pages = (answer(llm.generate(one, GREEDY)[0]) for one in (prompt, prompt[:96]))
    with LLM(tiny_folder, **TINY, chunked_prefill_size=chunk) as llm:
        llm.generate([*prompt[:shared], *ids(20, 3)], GREEDY)
        warm = llm.generate(prompt, GREEDY)[0]
        assert warm.num_cached_tokens == min(shared, 99) // PAGE * PAGE
        assert answer(warm) == cold
        assert answer(llm.generate(prompt, GREEDY)[0]) == cold, "and once more, on its own pages"
        last = llm.generate(prompt[:96], GREEDY)[0]
        assert (answer(last), last.num_cached_tokens) == (whole_pages, 80), "one token is always computed"
        llm.check_integrity()


# F4

CHUNK = 32


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add(Add(name, prompt, params))


def test_f4_a_long_prompt_does_not_freeze_the_streams(tiny_config: dict[str, Any]) -> None:
    tiny_config["max_position_embeddings"] = 4096
    config = EngineConfig(
        load_format="dummy", threads=1, page_size=PAGE, chunked_prefill_size=CHUNK, max_running_requests=8
    )
    core, _ = build_engine(tiny_config, config)
    steps: list[dict[str, Output]] = []

    def step() -> dict[str, Output]:
        steps.append({output.request_id: output for output in core.step()})
        return steps[-1]

    streams = [f"stream{i}" for i in range(4)]
    for number, name in enumerate(streams):
        add(core, name, ids(9, number), 400)
    while not all(any(name in news for news in steps) for name in streams):
        step()
    began = len(steps)
    add(core, "long", ids(50 * CHUNK, 9), 3)
    step()
    add(core, "short", ids(12, 10), 3)
    came = len(steps)
    while not any("long" in news for news in steps):
        news = step()
        assert news.keys() >= set(streams), "the worst gap of a running stream is one step, and a step is one chunk"
    first = {name: next(i for i, news in enumerate(steps) if name in news) for name in ("short", "long")}
    assert first["short"] - came <= 1, "the short prompt is answered in the next step or the one after"
    assert first["short"] < first["long"] and steps[first["short"] + 2]["short"].finish_reason == "length"
    least = -(-50 * CHUNK // (CHUNK - len(streams)))
    assert least <= first["long"] - began + 1 <= least + 2, "what the streams leave is the long prompt's"
    for name in (*streams, "long"):
        core.abort(name)
    core.step()
    core.check_integrity()
    assert core.scheduler.pool.usage == 0


# H2

IDLE = """
import asyncio, sys, time
from coterie import SamplingParams
from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine

async def main():
    engine = AsyncEngine.launch(sys.argv[1], EngineConfig(load_format="dummy", threads=4, max_model_len=256))
    output = await engine.generate([5] * 60, SamplingParams(max_tokens=40, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 40
    await asyncio.sleep(0.5)
    before = time.process_time()
    await asyncio.sleep(1.0)
    print(time.process_time() - before)
    await engine.shutdown(drain=True)

asyncio.run(main())
"""


def test_h2_an_idle_engine_uses_no_processor(tiny_folder: Path) -> None:
    """CPU seconds in a second after an answer: four spinning threads would burn as many as the machine has cores."""
    command = [sys.executable, "-c", IDLE, str(tiny_folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 0.1
