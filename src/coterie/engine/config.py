"""EngineConfig and ServiceConfig: what a user may choose about an engine, frozen.

`engine/resolve.py` resolves the first against a model; `engine/classes.py` makes shares of the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.engine.messages import ServiceClass
from coterie.spec.errors import CoterieError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Service classes gold, silver and bronze; triples are in that order. Off: one class, and none of this matters.

    default_class: of requests that name none. weights: multiply the classes' own factors 1.8, 1.3 and 1.0. slo_seconds:
    deadline of the first token; bronze is refused when it cannot be met, the others wait. max_queued: requests of one
    class that may wait; None takes max_queued_requests for each. Raises CoterieError for values that make no sense.
    """

    enabled: bool = False
    default_class: ServiceClass = "silver"
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    slo_seconds: tuple[float, float, float] = (2.0, 10.0, 60.0)
    max_queued: tuple[int | None, int | None, int | None] = (None, None, None)

    def __post_init__(self) -> None:
        for name, values in (("class weights", self.weights), ("class deadlines", self.slo_seconds)):
            if not all(1e-3 <= value <= 1e6 for value in values):
                raise CoterieError(f"{name} must lie between 0.001 and 1000000, got {values}")
        if not all(cap is None or cap >= 1 for cap in self.max_queued):
            raise CoterieError(f"a class's queue must have room for at least 1 request, got {self.max_queued}")


NO_CLASSES = ServiceConfig()
"""One class for everybody."""
