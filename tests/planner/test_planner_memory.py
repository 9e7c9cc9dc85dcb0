"""The memory budget: it adds up, is the engine's arithmetic, falls with more ranks, and refuses what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.model.banks import memory_needs
from coterie.model.names import weight_layout
from coterie.planner.devices import device
from coterie.planner.layout import Layout, Wish, choose, layouts, nearest_format
from coterie.planner.memory import (
    Load,
    budget,
    cache_bytes_per_token,
    exchange_buffers,
    least_devices,
    weight_items,
)
from coterie.planner.models import model
from coterie.spec import SpecError
from coterie.spec.stored import StoredQuant, StoredScheme
from coterie.spec.weights import BF16, QuantPlan

V3 = model("v3")[1]
LITE = model("v2-lite")[1]
H100 = device("h100")
ONE = Layout(devices=1, tp=1, dp=1, ep=1, weights="bf16")


def weight_bytes(layout: Layout, spec=V3) -> float:
    return sum(quantity.value for _, quantity in weight_items(spec, layout))


def test_items_and_the_rest_are_the_whole_device() -> None:
    for load in (Load(), Load(batch=64), Load(utilisation=0.5)):
        result = budget(V3, H100, choose(V3, H100, 16), load)
        assert result.used + result.free.value == pytest.approx(H100.memory_bytes)
        assert result.free.p10 <= result.free.value <= result.free.p90


def test_one_rank_holds_exactly_the_parameters() -> None:
    assert weight_bytes(ONE, LITE) == 2 * LITE.num_parameters
    assert all(quantity.kind == "exact" for _, quantity in weight_items(LITE, ONE))
    with_mtp = replace(ONE, mtp=True)
    assert weight_bytes(with_mtp) == 2 * (V3.num_parameters + V3.num_mtp_parameters)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "fp8"])
def test_weights_on_a_cpu_are_the_engines_but_for_the_padding_of_panels(name) -> None:
    layout = replace(ONE, weights=name, attention="bf16")
    table = weight_layout(LITE)
    form = QuantPlan().format(name) or BF16
    formats = {key: form if bank.role == "experts" else BF16 for key, bank in table.banks.items()}
    needs = {need.role: need.nbytes for need in memory_needs(table, formats)}
    items = dict(weight_items(LITE, layout, device("xeon-6980p")))
    ours = sum(items[f"{kind} ({name})"].value for kind in ("routed experts", "shared experts", "dense feed-forward"))
    assert needs["experts"] == pytest.approx(ours, rel=2e-3)
    assert needs["attention"] == pytest.approx(items["attention (bf16)"].value, rel=2e-3)
    assert needs["embedding"] == pytest.approx(items["embedding (bf16)"].value, rel=2e-3)


def test_the_cache_is_the_engines() -> None:
    assert cache_bytes_per_token(LITE, ONE).value == LITE.cache_bytes_per_token("bf16")
    assert cache_bytes_per_token(LITE, replace(ONE, kv="int8")).value == LITE.cache_bytes_per_token("int8")


def test_formats_are_those_of_the_checkpoint_unless_asked() -> None:
    def stored(scheme: StoredScheme, *ignored: str) -> tuple[str, str | None]:
        quant = StoredQuant("compressed-tensors", (scheme,), ignored)
        layout = choose(replace(V3, quantization=quant), H100, 16)
        return layout.weights, layout.attention

    assert stored(StoredScheme("pack", 4, 32), "re:.*self_attn.*") == ("int4", "bf16")
    assert stored(StoredScheme("nvfp4", 4, 16)) == ("fp4", None)
    assert stored(StoredScheme("gptq", 8, 128)) == ("int8", None)
    assert choose(V3, H100, 16, Wish(weights="bf16")).attention is None
    assert [nearest_format(each) for each in (2.0, 1.3, 0.9, 0.75, 0.5625)] == ["bf16", "int8", "int8", "int4", "int4"]


def test_formats_of_the_cache() -> None:
    def per_token(kv):
        return cache_bytes_per_token(V3, replace(ONE, kv=kv)).value

    assert (per_token("bf16"), per_token("fp8"), per_token("fp8-scaled")) == (70_272, 35_136, 40_016)


def test_mlas_cache_is_not_cut_by_tp_and_grouped_ones_is_down_to_a_head() -> None:
    wide = Layout(devices=8, tp=8, dp=1, ep=8)
    assert cache_bytes_per_token(V3, wide).value == 70_272
    llama = model("llama-3.1-70b")[1]
    for tp, share in ((1, 1.0), (4, 0.25), (8, 0.125), (16, 0.125)):
        layout = Layout(devices=tp, tp=tp, dp=1, ep=1)
        assert cache_bytes_per_token(llama, layout).value == share * 327_680


def test_more_expert_ranks_never_hold_more_weights() -> None:
    sizes = [weight_bytes(Layout(devices=n, tp=1, dp=n, ep=n)) for n in (8, 16, 32, 64, 128, 256)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_redundant_slot_a_rank_on_32_ranks_is_an_eighth_of_the_experts() -> None:
    plain = Layout(devices=32, tp=1, dp=32, ep=32)
    items = dict(weight_items(V3, replace(plain, redundant=32)))
    assert items["redundant experts (fp8)"].value == pytest.approx(items["routed experts (fp8)"].value / 8)
    assert "redundant experts (fp8)" not in dict(weight_items(V3, plain))


def test_fp8_weights_of_v3_are_the_published_size() -> None:
    """671 to 689 GB, without and with the prediction block; embedding and head stay in 16 bits."""
    one = Layout(devices=1, tp=1, dp=1, ep=1)
    assert 671e9 < weight_bytes(one) < 674e9
    assert 683e9 < weight_bytes(replace(one, mtp=True)) < 689e9


def test_exchange_buffers_are_deepeps() -> None:
    """Two pairs of 256 x 128 rows of 14,336 B and their 224 B of scales."""
    layout = Layout(devices=32, tp=1, dp=32, ep=32)
    assert exchange_buffers(V3, H100, layout, Load(batch=32)).value == 4 * 256 * 128 * 14_560
    assert exchange_buffers(V3, H100, layout, Load(batch=32 * 256)).value == 4 * 256 * 256 * 14_560
    assert exchange_buffers(V3, H100, Layout(devices=8, tp=8, dp=1, ep=8), Load()).value == 0


def test_exchange_buffers_of_cpus_are_of_what_is_sent() -> None:
    """A chunk's rows to eight experts: int8 with a float32 for 128 inputs, and float32 or bf16 back."""
    cpu = device("xeon-6980p")
    layout = Layout(devices=4, tp=1, dp=4, ep=4, weights="int8")
    rows = Load().chunk * 8 * 7168
    assert exchange_buffers(V3, cpu, layout, Load()).value == rows * (1 + 4 / 128 + 4)
    assert exchange_buffers(V3, cpu, replace(layout, exchange="bfloat16"), Load()).value == rows * (1 + 4 / 128 + 2)
    assert exchange_buffers(V3, cpu, replace(layout, weights="bf16"), Load()).value == rows * (4 + 4)


def test_capacity_is_whole_pages_and_requests_of_whole_groups() -> None:
    load = Load(isl=4096, osl=1024, page=64)
    result = budget(V3, device("h200"), choose(V3, device("h200"), 16), load)
    assert result.capacity_tokens.value % 64 == 0
    assert result.capacity_tokens.value * 70_272 <= result.free.value
    assert result.b_cap.value == result.capacity_tokens.value // 4608 * 16
    assert result.b_cap_safe.value == result.capacity_tokens.value // 5120 * 16


def test_longer_contexts_and_less_memory_hold_fewer_requests() -> None:
    layout = choose(V3, device("h200"), 16)
    held = [budget(V3, device("h200"), layout, Load(isl=isl)).b_cap.value for isl in (1024, 4096, 16384, 65536)]
    assert held == sorted(held, reverse=True)
    held = [budget(V3, replace(device("h200"), memory_gb=gb), layout).b_cap.value for gb in (300, 141, 100, 80, 10)]
    assert held == sorted(held, reverse=True) and held[-1] == 0


def test_what_does_not_fit_says_how_many_devices_do() -> None:
    layout = choose(V3, H100, 8)
    result = budget(V3, H100, layout)
    assert not result.fits and result.free.value < 0 and result.b_cap.value == 0
    assert least_devices(V3, H100, layout, Load()) == 16
    assert budget(V3, H100, choose(V3, H100, 16)).fits
    assert not budget(V3, H100, choose(V3, H100, 16), Load(batch=4000)).fits


def test_seed_layouts_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(SpecError, match="tp 1 x dp 16, tp 16 x dp 1"):
        budget(V3, H100, Layout(devices=16, tp=8, dp=2, ep=16))
    with pytest.raises(SpecError, match="valid for 8 devices"):
        choose(V3, H100, 8, Wish(tp=8, dp=4))
    with pytest.raises(SpecError, match=r"tp 3 does not divide the attention heads .* tp can be 1, 2, 4"):
        choose(V3, H100, 3, Wish(tp=3))
    assert all(layout.tp in (1, 16) or layout.ep <= layout.tp for layout in layouts(V3, 16, choose(V3, H100, 16)))


def test_a_default_layout_follows_from_the_model() -> None:
    assert choose(V3, H100, 16) == Layout(devices=16, tp=1, dp=16, ep=16, weights="fp8")
    llama = model("llama-3.1-70b")[1]
    assert (choose(llama, H100, 16).tp, choose(llama, H100, 16).dp) == (8, 2)
    assert choose(V3, H100, 24).redundant == 8  # 264 slots over 24 ranks
    assert choose(model("mixtral-8x7b")[1], H100, 16).ep == 8


@pytest.mark.parametrize("name", ["llama-3.1-70b", "glm-4.5", "mixtral-8x7b", "deepseek-r1"])
def test_more_devices_of_a_large_domain_never_hold_fewer_requests(name: str) -> None:
    """A tp beyond the key heads repeats the cache, so the default does not take the whole domain."""
    spec, hardware = model(name)[1], device("gb200")
    held = [budget(spec, hardware, choose(spec, hardware, count)).b_cap.value for count in (8, 16, 64, 72, 128, 144)]
    assert held == sorted(held)


@pytest.mark.parametrize(
    "values",
    [{"isl": -1}, {"osl": 0}, {"batch": 0}, {"utilisation": 0.0}, {"utilisation": 1.5}, {"isl": 10**12}, {"page": 0}],
)
def test_sizes_that_cannot_be_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(SpecError, match=next(iter(values))):
        Load(**values)


def test_a_model_without_a_prediction_block_cannot_load_one() -> None:
    with pytest.raises(SpecError, match="no multi-token-prediction block"):
        weight_items(LITE, replace(ONE, mtp=True))


@given(
    name=st.sampled_from(["v3", "v2-lite", "mixtral-8x7b", "qwen3-235b", "llama-3.1-70b"]),
    devices=st.sampled_from([1, 2, 4, 8, 12, 16, 48, 64]),
    pick=st.integers(0, 10_000),
    batch=st.one_of(st.none(), st.integers(1, 5000)),
)
@settings(max_examples=60)
def test_every_layout_holds_all_weights_and_adds_up(name: str, devices: int, pick: int, batch: int | None) -> None:
    """Ranks together hold each weight; items and the rest are the device; more memory never holds less."""
    spec = model(name)[1]
    found = list(layouts(spec, devices, Layout(devices=devices, tp=1, dp=devices, ep=devices, weights="bf16")))
    if not found:
        return
    layout = found[pick % len(found)]
    assert weight_bytes(layout, spec) * devices >= 2 * spec.num_parameters * (1 - 1e-12)
    result = budget(spec, H100, layout, Load(batch=batch))
    assert result.used + result.free.value == pytest.approx(H100.memory_bytes)
    assert result.b_cap_safe.value <= result.b_cap.value
    assert result.b_cap.p10 <= result.b_cap.value <= result.b_cap.p90
    larger = budget(spec, replace(H100, memory_gb=200), layout, Load(batch=batch))
    assert larger.b_cap.value >= result.b_cap.value
