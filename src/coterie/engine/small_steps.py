"""Small steps: seconds of the engine's own steps on models too small to matter, for the constants of `plan calibrate`.

The models are made up (a few narrow layers, dummy weights), so what their steps take is mostly what every step and
layer takes: calls, scheduling, sampling, norms. Decode with some streams, prefill of a prompt. No limits are read here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.engine.build import build_engine, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.messages import Add, SamplingParams
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec

VOCABS = (512, 8192)
"""The larger one in the first size only: what a logit costs."""
CONTEXT = 96
STREAMS = (1, 4, 16)
PROMPTS = (32, 512)
STEPS = 24
SIZES = ((2, 2), (8, 8), (8, 1))
"""(layers, dense ones among them) of the made-up models, for each width."""
WIDTHS = (128, 512)


@dataclass(frozen=True, slots=True)
class SmallStep:
    """Fastest of some steps. decode: `batch` streams with about `context` tokens each; else one prompt of `context`."""

    spec: ModelSpec
    decode: bool
    batch: int
    context: float
    seconds: float


def tiny_config(width: int, size: tuple[int, int], vocab: int) -> dict[str, Any]:
    """A DeepSeek-V2-like config.json with (layers, dense ones among them)."""
    layers, dense = size
    return {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": vocab,
        "hidden_size": width, "intermediate_size": 2 * width, "moe_intermediate_size": width // 2,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": dense, "moe_layer_freq": 1,
        "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "q_lora_rank": None, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16, "v_head_dim": 24, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": None, "max_position_embeddings": 2048, "tie_word_embeddings": False, "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip


def small_steps(threads: int | None = None) -> Iterator[SmallStep]:
    """Measure every made-up model. Raises CoterieError if a step fails."""
    for width in WIDTHS:
        for size in SIZES:
            for vocab in VOCABS if size == SIZES[0] else VOCABS[:1]:
                yield from _model(tiny_config(width, size, vocab), threads)


def _model(config: dict[str, Any], threads: int | None) -> Iterator[SmallStep]:
    most = EngineConfig(
        load_format="dummy", threads=threads, max_model_len=1024, kv_cache_tokens=1024 * max(STREAMS),
        enable_prefix_caching=False,
    )  # fmt: skip
    files = open_model(config)
    timer = StepTimer(build_engine(files, most)[0])
    for length in PROMPTS:
        yield SmallStep(files.spec, False, 1, length, min(timer.prompt(length) for _ in range(4)))
    for batch in STREAMS:
        times = timer.streams(batch, CONTEXT, STEPS)
        yield SmallStep(files.spec, True, batch, CONTEXT + STEPS / 2, float(np.quantile(times, 0.25)))


class StepTimer:
    """Times steps of an engine that has nothing else to do. Its prefix cache must be off."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._serial = 0

    def prompt(self, length: int) -> float:
        """Seconds from adding one prompt of random tokens to its first token."""
        self._add(length, 1)
        begin = time.perf_counter()
        while self.core.has_work:
            self._step()
        return time.perf_counter() - begin

    def streams(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of some decode steps of so many streams, which have `context` tokens at the first."""
        waiting = {self._add(context, None) for _ in range(batch)}
        while waiting:
            waiting -= self._step()
        self._step()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - begin)
        self.core.abort_all()
        while self.core.has_work:
            self.core.step()
        return times

    def _add(self, length: int, most: int | None) -> str:
        self._serial += 1
        name = f"timed-{self._serial}"
        prompt = np.random.default_rng(self._serial).integers(2, self.core.vocab_size, length).tolist()
        self.core.add(Add(name, prompt, SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)))
        return name

    def _step(self) -> set[str]:
        """Do one step. Returns who said something."""
        outputs = self.core.step()
        for output in outputs:
            if output.error is not None:
                raise CoterieError(f"a step that was to be timed failed: {output.error}")
        return {output.request_id for output in outputs if output.token_ids}
