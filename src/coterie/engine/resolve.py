"""Resolution of an EngineConfig against a model and a machine: data types, context length, size of the cache.

Every choice comes with its reason. What does not fit is refused with the numbers, before anything is allocated. Bytes
per token are ModelSpec's, the memory that may be had is `engine/memory.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from coterie.engine.config import EngineConfig
from coterie.kernels.select import Choice
from coterie.model.banks import RoleNeed
from coterie.spec.cache import CacheKind
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.weights import OWN_GROUPS

DEFAULT_CONTEXT = 32_768
"""Longest context that is chosen unasked; models that promise more get it by --max-model-len."""

RANK_MEMORY = 170_000_000
"""Bytes that a rank's process has to itself before any weights: Python, numpy, torch and the exchange. One of two
ranks of the shipped model was measured at 181 MB, 10 MB of them weights (resident with what processes share: 275)."""
LEAST_BYTES = 0.5
"""Of a weight, in the smallest format that can be asked for."""

KIND_OF_DTYPE: dict[str, CacheKind] = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the engine is built with."""

    cache_kind: CacheKind
    max_model_len: int
    num_blocks: int
    report: tuple[Choice, ...]


def check_config(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse what needs no weights to be seen wrong, so that nobody waits for a load first. Raises `CoterieError`."""
    if spec.missing:
        raise CoterieError(f"{spec.model_type} can be planned but not run: the engine lacks {spec.missing}")
    names = ("max_model_len", "max_running_requests", "chunked_prefill_size", "page_size", "kv_cache_tokens", "threads")
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise CoterieError(f"{name} must be at least 1, not {value}")
    if config.max_queued_requests < 0:
        raise CoterieError(f"max_queued_requests must not be negative, not {config.max_queued_requests}")
    if not 0 < config.mem_fraction_static <= 1:
        raise CoterieError(f"mem_fraction_static must be above 0 and at most 1, not {config.mem_fraction_static}")
    asked = config.max_model_len
    if asked is not None and asked > spec.max_positions:
        raise CoterieError(
            f"max_model_len {asked} is beyond the model's {spec.max_positions} positions; ask for at most that"
        )


def memory_of_rank(spec: ModelSpec, num_ranks: int, local: int, available: int) -> int:
    """Bytes for weights and cache of each of `local` ranks on this machine. Raises `CoterieError` before any of them is
    started if that is less than an even part of the weights in their smallest format."""
    least = int(spec.num_parameters * LEAST_BYTES) // num_ranks
    memory = available // local - RANK_MEMORY
    if memory >= max(1, least):
        return memory
    fit = available // (RANK_MEMORY + least)
    raise CoterieError(
        f"{local} ranks on this machine need {gigabytes(local * (RANK_MEMORY + least))}: each {gigabytes(RANK_MEMORY)} "
        f"for its process and at least {gigabytes(least)} for its part of the weights; {gigabytes(available)} can be "
        f"had, enough for {fit}"
    )


def check_weights_fit(needs: tuple[RoleNeed, ...], spec: ModelSpec, config: EngineConfig, available: int) -> None:
    """Refuse weights and the least cache that are more than the memory. Raises `CoterieError` with every item."""
    tokens = config.kv_cache_tokens or config.max_model_len or config.page_size
    asked = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    cache = tokens * spec.cache_bytes_per_token("bf16" if asked == "auto" else KIND_OF_DTYPE[asked])
    needed = cache + sum(need.nbytes for need in needs)
    if needed <= available:
        return
    items = [f"{need.role} {gigabytes(need.nbytes)} as {need.label}" for need in needs]
    items.append(f"cache of {tokens} tokens {gigabytes(cache)}")
    rest = available - needed + next((need.nbytes for need in needs if need.role == "experts"), 0)
    raise CoterieError(
        f"the model needs {gigabytes(needed)}, {gigabytes(available)} of memory can be had: {', '.join(items)}; "
        + _smaller(next((need.values for need in needs if need.role == "experts"), 0), rest)
    )


def _smaller(values: int, rest: int) -> str:
    """What to change: the widest format of the experts with which everything else would still fit."""
    scaled = [(name, bits + 16 / OWN_GROUPS[name]) for name, bits in (("int8", 8), ("int4", 4))]
    for name, bits in [("bf16", 16.0), *scaled]:
        if 0 < values * bits / 8 <= rest:
            return f"ask for --experts {name}, with which they need {gigabytes(int(values * bits / 8))}"
    return "use a smaller model or a larger machine; --experts int4, --attention int8 and --head int8 need least"


def resolve(spec: ModelSpec, config: EngineConfig, weight_kind: CacheKind, available: int) -> Resolved:
    """Choose context length and cache. `available`: bytes that may be had once the weights are loaded."""
    check_config(spec, config)
    cache_kind = _cache_kind(config, weight_kind)
    token_bytes = spec.cache_bytes_per_token(cache_kind.value)
    budget = int(available * config.mem_fraction_static)
    fits = budget // max(1, token_bytes) // config.page_size * config.page_size
    if config.kv_cache_tokens is not None:
        fits = _asked_capacity(config, token_bytes, available)
    length = _context(spec, config, fits, token_bytes)
    capacity = _capacity(config, int(length.value), fits)
    num_blocks = int(capacity.value) // config.page_size
    size = Choice("cache memory", gigabytes(num_blocks * config.page_size * token_bytes), f"{token_bytes} B a token")
    report = (cache_kind.choice("cache dtype"), length, capacity, size)
    return Resolved(cache_kind.value, int(length.value), num_blocks, report)


class _Kind(NamedTuple):
    value: CacheKind
    reason: str

    def choice(self, what: str) -> Choice:
        return Choice(what, self.value, self.reason)


def _cache_kind(config: EngineConfig, weight_kind: CacheKind) -> _Kind:
    if config.kv_cache_dtype == "auto":
        return _Kind(weight_kind, "as the weights")
    return _Kind(KIND_OF_DTYPE[config.kv_cache_dtype], "asked for")


def _context(spec: ModelSpec, config: EngineConfig, fits: int, token_bytes: int) -> Choice:
    """The longest prompt plus answer."""
    asked = config.max_model_len
    if fits < pages_for(asked or 1, config.page_size) * config.page_size:
        raise CoterieError(_too_small(config, asked, fits, token_bytes))
    if asked is not None:
        return Choice("max_model_len", str(asked), "asked for")
    length = min(spec.max_positions, DEFAULT_CONTEXT, fits)
    reason = "the model's positions"
    if length < spec.max_positions:
        limit = "what fits in the cache" if length == fits else "the default bound"
        reason = f"{limit}; the model allows {spec.max_positions}"
    return Choice("max_model_len", str(length), reason)


def _asked_capacity(config: EngineConfig, token_bytes: int, available: int) -> int:
    """kv_cache_tokens in whole pages, if memory can hold them."""
    capacity = pages_for(config.kv_cache_tokens or 1, config.page_size) * config.page_size
    if capacity * token_bytes > available:
        raise CoterieError(
            f"kv_cache_tokens {config.kv_cache_tokens} needs {gigabytes(capacity * token_bytes)} at {token_bytes} B a "
            f"token, {gigabytes(available)} of memory can be had; ask for at most {available // max(1, token_bytes)}"
        )
    return capacity


def _too_small(config: EngineConfig, asked: int | None, fits: int, token_bytes: int) -> str:
    wanted = f"one request of max_model_len {asked}" if asked is not None else f"one page of {config.page_size} tokens"
    if config.kv_cache_tokens is not None:
        return (
            f"kv_cache_tokens {config.kv_cache_tokens} cannot hold {wanted}; raise it, or lower max_model_len to {fits}"
        )
    needed = (asked or config.page_size) * token_bytes
    lower = f"max_model_len to at most {fits}" if asked is not None and fits else "page_size"
    return (
        f"the cache cannot hold {wanted}: that needs {gigabytes(needed)} at {token_bytes} B a token, and "
        f"{config.mem_fraction_static:g} of free memory holds {fits} tokens; lower {lower}, "
        "raise mem_fraction_static, or use kv_cache_dtype bfloat16 or int8"
    )


def _capacity(config: EngineConfig, length: int, fits: int) -> Choice:
    """Tokens of cache, a whole number of pages; always enough for one request of `length`."""
    page = config.page_size
    if config.kv_cache_tokens is not None:
        return Choice("kv_cache_tokens", str(fits), "asked for")
    most = config.max_running_requests * pages_for(length, page) * page
    if most <= fits:
        reason = f"{config.max_running_requests} running requests of {length} tokens"
        return Choice("kv_cache_tokens", str(most), reason)
    return Choice("kv_cache_tokens", str(fits), f"{config.mem_fraction_static:g} of the free memory")


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


def gigabytes(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10_000_000 else f"{num_bytes / 1e6:.2f} MB"
