"""An engine without weights: real scheduler, sampler and core on a runner whose logits follow from the tokens seen.

The runner keeps tokens by cache slot, so it answers rightly only if the paging is right. The vocabulary is that of
`tiny_tokenizers.byte_tokenizer`. A token in `poison` makes the runner raise, one in `rotten` makes its row NaN.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np

from coterie.cache.block_pool import BlockPool
from coterie.engine.build import EngineInfo, ModelFiles
from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.frontend import AsyncEngine
from coterie.engine.grammar import Grammars
from coterie.engine.llm import LLM
from coterie.engine.messages import Add, SamplingParams
from coterie.engine.runner import ModelRunner
from coterie.engine.sampler import Sampler
from coterie.engine.scheduler import Scheduler, SchedulerLimits
from coterie.engine.tokenizer import Tokenizer
from coterie.engine.worker import start_thread
from coterie.kernels.batch import ForwardBatch
from coterie.observe.stages import StageTimer
from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec

VOCAB = 260
EOS = 257


def logits_after(history: Sequence[int]) -> np.ndarray:
    """The mock model: float32 [VOCAB], from the last 8 tokens; only letters and the space are likely."""
    seed = 7
    for token in history[-8:]:
        seed = (seed * 1_000_003 + token + 1) % 2**32
    row = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    row[[32, *range(97, 123)]] += 8
    return row


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy decoding must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


@dataclass
class MockRunner:
    """`script`: tokens that follow whatever came, by how many tokens there are; `delay`: seconds a step takes."""

    poison: frozenset[int] = frozenset()
    rotten: frozenset[int] = frozenset()
    script: dict[int, int] = field(default_factory=dict)
    delay: float = 0.0
    timer: StageTimer = field(default_factory=StageTimer)
    memory: dict[int, int] = field(default_factory=dict)
    batches: list[ForwardBatch] = field(default_factory=list)

    def run(self, batch: ForwardBatch, *, micro_batches: int = 1) -> np.ndarray:
        time.sleep(self.delay)
        self.batches.append(batch)
        if self.poison & set(batch.token_ids.tolist()):
            raise RuntimeError("poisoned row")
        assert batch.slot_mapping is not None and batch.block_tables is not None
        for slot, token in zip(batch.slot_mapping.tolist(), batch.token_ids.tolist(), strict=True):
            self.memory[slot] = token
        rows = [self._row(batch, int(row)) for row in batch.logit_rows]
        return np.stack(rows) if rows else np.zeros((0, VOCAB), np.float32)

    def _row(self, batch: ForwardBatch, row: int) -> np.ndarray:
        sequence = int(np.searchsorted(batch.query_start, row, "right")) - 1
        assert batch.block_tables is not None
        table, size = batch.block_tables[sequence].tolist(), batch.page_size
        history = [self.memory[table[p // size] * size + p % size] for p in range(int(batch.positions[row]) + 1)]
        if self.rotten & set(history):
            return np.full(VOCAB, np.nan, np.float32)
        values = logits_after(history)
        if len(history) in self.script:
            values[self.script[len(history)]] = 100
        return values


def make_core(
    runner: MockRunner | None = None,
    *,
    blocks: int = 64,
    max_model_len: int = 128,
    tokenizer: Tokenizer | None = None,
    **limits: Any,
) -> EngineCore:
    """A core on a mock runner, pages of 4; with a tokenizer it can follow grammars."""
    settings = {"token_budget": 32, "max_running": 8, "max_queued": 64, "page_size": 4} | limits
    scheduler = Scheduler(SchedulerLimits(**settings), BlockPool(blocks), (EOS,))
    return EngineCore(
        scheduler,
        cast(ModelRunner, runner or MockRunner()),
        Sampler((EOS,)),
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        grammars=None if tokenizer is None else Grammars(tokenizer, (EOS,), VOCAB),
    )


def make_add(name: str, prompt: Sequence[int], max_tokens: int = 6, **params: Any) -> Add:
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | params
    return Add(name, list(prompt), SamplingParams(**values))


def make_info(tokenizer: Tokenizer | None, max_model_len: int = 128, **config: Any) -> EngineInfo:
    """What the front ends are told about the mock."""
    rope = RopeSpec(4, 10000.0, interleaved=False)
    attention = AttentionSpec("gqa", 1, 1, 4, 4, 0.5, rope)
    spec = ModelSpec("llama", VOCAB, 4, (LayerSpec(attention, DenseSpec(4)),), 1e-6, 128)
    settings = EngineConfig(**{"max_running_requests": 8, "max_queued_requests": 16, **config})
    return EngineInfo(ModelFiles(spec, None, tokenizer, (EOS,)), settings, max_model_len, ())


def make_llm(folder: Path | None, core: EngineCore, **config: Any) -> LLM:
    info = make_info(None if folder is None else Tokenizer(folder), core.max_model_len, **config)
    with mock.patch("coterie.engine.llm.build_engine", return_value=(core, info)):
        return LLM(config=info.config)


def make_engine(folder: Path | None, core: EngineCore, **config: Any) -> AsyncEngine:
    """An AsyncEngine whose loop runs on a thread."""
    engine = AsyncEngine(make_info(None if folder is None else Tokenizer(folder), core.max_model_len, **config), "mock")
    engine.connect(start_thread(core, *engine.callbacks()))
    return engine
