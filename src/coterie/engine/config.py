"""EngineConfig and ServiceConfig: what a user may choose about an engine, frozen.

`engine/resolve.py` resolves the first against a model; `engine/classes.py` makes shares of the second. Users name the
weight formats beside the other fields (`--experts`, LLM(experts=...)): `engine_config` sorts names into both values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from coterie.engine.messages import ServiceClass
from coterie.spec.errors import CoterieError
from coterie.spec.parallel import ExchangeDtype
from coterie.spec.weights import QuantPlan

AS_STORED = QuantPlan()
"""Weights as the files hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Flag names follow SGLang and vLLM where the meaning is the same.

    chunked_prefill_size: token budget of one step (prompt chunks and decode rows together).
    kv_cache_tokens: capacity of the cache in tokens; None derives it from `mem_fraction_static` of free memory, bounded
    by max_running_requests * max_model_len. quant: weight formats. exchange_dtype: of routed experts' outputs before
    they are summed, on any number of ranks: on their way back from other ranks bfloat16 is half the bytes.
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
    quant: QuantPlan = AS_STORED
    exchange_dtype: ExchangeDtype = "float32"


FORMAT_NAMES = frozenset(field.name for field in fields(QuantPlan))
OPTION_NAMES = FORMAT_NAMES | {field.name for field in fields(EngineConfig)} - {"quant"}
"""What users name: fields of EngineConfig and of its weight formats."""


def engine_config(options: Mapping[str, Any], base: EngineConfig | None = None) -> EngineConfig:
    """`base` (the defaults) with some of `OPTION_NAMES` changed. Raises TypeError for an unknown name."""
    base = base or EngineConfig()
    formats = {name: value for name, value in options.items() if name in FORMAT_NAMES}
    rest = {name: value for name, value in options.items() if name not in FORMAT_NAMES}
    return replace(replace(base, **rest), quant=replace(base.quant, **formats)) if formats else replace(base, **rest)


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
