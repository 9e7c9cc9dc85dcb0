"""Resolution: types, context and cache size with their reasons; what does not fit is refused with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.engine.config import EngineConfig
from coterie.engine.resolve import (
    DEFAULT_CONTEXT,
    RANK_MEMORY,
    Resolved,
    check_weights_fit,
    memory_of_rank,
    resolve,
)
from coterie.model.banks import RoleNeed
from coterie.spec.errors import CoterieError
from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec


def make_spec(max_positions: int = 4096, dtype: str = "bfloat16") -> ModelSpec:
    """One GQA layer: 128 cache values a token."""
    attention = AttentionSpec("gqa", 4, 2, 32, 32, 0.2, RopeSpec(32, 1e4, interleaved=False))
    return ModelSpec("llama", 100, 64, (LayerSpec(attention, DenseSpec(64)),), 1e-6, max_positions, dtype=dtype)


def reasons(resolved: Resolved) -> dict[str, str]:
    return {choice.what: choice.reason for choice in resolved.report}


def test_bounded_by_what_requests_can_use() -> None:
    resolved = resolve(make_spec(), EngineConfig(max_running_requests=4), "bf16", 1 << 40)
    assert (resolved.max_model_len, resolved.num_blocks, resolved.cache_kind) == (4096, 4 * 64, "bf16")
    assert "4 running requests" in reasons(resolved)["kv_cache_tokens"]


def test_bounded_by_memory() -> None:
    available = 10_000 * 256
    resolved = resolve(make_spec(), EngineConfig(mem_fraction_static=0.5), "bf16", available)
    assert resolved.num_blocks == 5000 // 64 and resolved.max_model_len == 4096
    assert "0.5 of the free memory" in reasons(resolved)["kv_cache_tokens"]
    small = resolve(make_spec(), EngineConfig(mem_fraction_static=0.1), "bf16", available)
    assert small.max_model_len == small.num_blocks * 64 == 960
    assert "fits" in reasons(small)["max_model_len"] and "4096" in reasons(small)["max_model_len"]


def test_float32_rows_take_twice_the_room() -> None:
    available = 10_000 * 256
    config = EngineConfig(mem_fraction_static=0.5)
    assert resolve(make_spec(), config, "f32", available).num_blocks == 2500 // 64
    narrow = EngineConfig(mem_fraction_static=0.5, kv_cache_dtype="bfloat16")
    assert resolve(make_spec(), narrow, "f32", available).num_blocks == 5000 // 64


def test_int8_rows_count_their_scales() -> None:
    config = EngineConfig(mem_fraction_static=0.5, kv_cache_dtype="int8")
    resolved = resolve(make_spec(), config, "bf16", 10_000 * 256)
    assert (resolved.cache_kind, resolved.num_blocks) == ("int8", 10_000 * 128 // (128 + 4 * 4) // 64)
    assert "144 B a token" in reasons(resolved)["cache memory"]


def test_a_huge_context_is_not_taken_unasked() -> None:
    spec = make_spec(max_positions=1 << 20)
    resolved = resolve(spec, EngineConfig(), "bf16", 1 << 40)
    assert resolved.max_model_len == DEFAULT_CONTEXT and str(1 << 20) in reasons(resolved)["max_model_len"]
    assert resolve(spec, EngineConfig(max_model_len=1 << 20), "bf16", 1 << 40).max_model_len == 1 << 20


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_model_len": 4097}, ["4097", "4096"]),
        ({"max_model_len": 2000, "kv_cache_tokens": 1000}, ["1000", "2000", "1024"]),
        ({"max_model_len": 4096, "mem_fraction_static": 0.1}, ["4096", "960", "256 B"]),
        ({"mem_fraction_static": 0.001}, ["64 tokens", "mem_fraction_static"]),
        ({"kv_cache_tokens": 20_000}, ["20000", "10000"]),
        ({"page_size": 1_000_000}, ["one page of 1000000 tokens", "lower page_size"]),
        ({"page_size": 0}, ["page_size", "0"]),
        ({"max_running_requests": 0}, ["max_running_requests"]),
        ({"mem_fraction_static": float("nan")}, ["mem_fraction_static"]),
    ],
)
def test_refusals_name_the_numbers(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CoterieError) as caught:
        resolve(make_spec(), EngineConfig(**config), "bf16", 10_000 * 256)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_asked_capacity_is_kept() -> None:
    resolved = resolve(make_spec(), EngineConfig(kv_cache_tokens=1000, page_size=16), "bf16", 1 << 40)
    assert resolved.num_blocks == 63 and resolved.max_model_len == 1008


def test_weights_that_do_not_fit() -> None:
    spec = make_spec()
    values = 10**9
    needs = (
        RoleNeed("experts", "bf16", values, 2 * values),
        RoleNeed("attention", "bf16", values // 10, values // 5),
        RoleNeed("head", "bf16", values // 100, values // 50),
        RoleNeed("embedding", "bf16", values // 100, values // 50),
    )
    whole = sum(need.nbytes for need in needs)
    cache = 64 * 256
    check_weights_fit(needs, spec, EngineConfig(), whole + cache)
    with pytest.raises(CoterieError) as caught:
        check_weights_fit(needs, spec, EngineConfig(), whole + cache - 1)
    items = "experts 2.00 GB as bf16, attention 0.20 GB as bf16, head 0.02 GB as bf16, embedding 0.02 GB as bf16"
    assert f"{items}, cache of 64 tokens 0.02 MB" in str(caught.value)
    assert "ask for --experts int8, with which they need 1.02 GB" in str(caught.value)
    with pytest.raises(CoterieError, match=r"ask for --experts int4, with which they need 0\.56 GB"):
        check_weights_fit(needs, spec, EngineConfig(), whole - 10**9)
    with pytest.raises(CoterieError, match=r"cache of 1000000 tokens 0\.51 GB.*use a smaller model"):
        check_weights_fit(needs, spec, EngineConfig(kv_cache_tokens=10**6, dtype="float32"), 10**9)


def test_ranks_that_cannot_fit_are_refused_with_what_does() -> None:
    spec = make_spec()
    least = spec.num_parameters // 2 // 4
    room = 4 * (RANK_MEMORY + least)
    assert memory_of_rank(spec, 4, 4, room) == least
    assert memory_of_rank(spec, 4, 2, room) == room // 2 - RANK_MEMORY, "two of the four are here"
    with pytest.raises(CoterieError, match=r"4 ranks on this machine need .*at least .*, enough for 3$"):
        memory_of_rank(spec, 4, 4, room - 4)
    with pytest.raises(CoterieError, match=r"enough for 0$"):
        memory_of_rank(spec, 4, 4, 1000)
