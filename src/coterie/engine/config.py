"""EngineConfig: what a user may choose about an engine, frozen. `engine/resolve.py` resolves it against a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.spec.weights import DenseChoice, ExpertsChoice, QuantPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Flag names follow SGLang and vLLM where the meaning is the same.

    chunked_prefill_size: token budget of one step (prompt chunks and decode rows together).
    kv_cache_tokens: capacity of the cache in tokens; None derives it from `mem_fraction_static` of free memory, bounded
    by max_running_requests * max_model_len.
    """

    backend: Literal["native", "reference"] = "native"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    chunked_prefill_size: int = 512
    page_size: int = 64
    kv_cache_tokens: int | None = None
    mem_fraction_static: float = 0.8
    enable_prefix_caching: bool = True
    threads: int | None = None
    isa: Literal["auto", "generic", "avx2", "avx512", "amx"] = "auto"
    seed: int = 0
    strict: bool = False
    experts: ExpertsChoice = "auto"
    attention: DenseChoice = "auto"
    head: DenseChoice = "auto"
    group: Literal[16, 32, 64, 128] = 32

    @property
    def quant(self) -> QuantPlan:
        """The weight formats asked for."""
        return QuantPlan(self.experts, self.attention, self.head, self.group)
