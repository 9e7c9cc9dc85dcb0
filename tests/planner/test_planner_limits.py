"""The reference paper's three limits: its results within two per cent, what does not move them, refusals in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coterie.planner.devices import device
from coterie.planner.layout import CacheName, Layout, WeightName
from coterie.planner.limits import Terms, attention_intensity, paper_limits, ridge_rows
from coterie.planner.models import model
from coterie.spec import SpecError

PAPER = device("b200-paper")
R1 = model("r1")[1]


def laid(n: int, tp: int = 1, weights: WeightName = "bf16", kv: CacheName = "bf16", ep: int | None = None) -> Layout:
    return Layout(devices=n, tp=tp, dp=n // tp, ep=n if ep is None else ep, weights=weights, kv=kv)


# arXiv 2507.15465 (v3, section VII): L = 8,192, 32 B200, BF16
@pytest.mark.parametrize(
    ("name", "layout", "requests"),
    [("r1", laid(32), 7360), ("llama-4-maverick", laid(32, 8), 3328), ("gpt-3", laid(32, 8, ep=1), 124)],
)
def test_capacity_is_the_papers_within_two_per_cent(name: str, layout: Layout, requests: int) -> None:
    found = paper_limits(model(name)[1], PAPER, layout, 8192)
    assert found.b_cap.value == pytest.approx(requests, rel=0.02)
    assert found.binds == "capacity"


def test_compute_limits_are_the_papers_and_do_not_depend_on_context_or_fp8() -> None:
    for layout in (laid(32), laid(32, weights="fp8"), laid(32, weights="fp8", kv="fp8")):
        for context in (512, 8192, 65536):
            found = paper_limits(R1, PAPER, layout, context)
            assert (found.b_attn.value, found.b_moe.value, found.b_rp.value) == (9000, 9000, 9000)
    maverick = paper_limits(model("llama-4-maverick")[1], PAPER, laid(32, 8), 8192)
    assert maverick.b_moe.value == 36_000
    assert ridge_rows(PAPER, "int4") == ridge_rows(PAPER, "bf16") / 4


def test_sixty_is_the_ratio_of_capacities() -> None:
    ours = paper_limits(R1, PAPER, laid(32), 8192).b_cap.value
    assert ours / paper_limits(model("gpt-3")[1], PAPER, laid(32, 8, ep=1), 8192).b_cap.value == pytest.approx(
        59, rel=0.03
    )
    assert ours / paper_limits(model("llama-4")[1], PAPER, laid(32, 8), 8192).b_cap.value == pytest.approx(
        2.21, rel=0.03
    )


def test_fp8_raises_capacity_by_a_quarter_and_with_the_cache_by_two_and_a_half() -> None:
    plain = paper_limits(R1, PAPER, laid(32), 8192).b_cap.value
    assert paper_limits(R1, PAPER, laid(32, weights="fp8"), 8192).b_cap.value / plain == pytest.approx(1.24, abs=0.005)
    both = paper_limits(R1, PAPER, laid(32, weights="fp8", kv="fp8"), 8192).b_cap.value
    assert both / plain == pytest.approx(2.48, abs=0.005)


def test_a_quarter_of_the_context_holds_four_times_the_requests() -> None:
    held = [paper_limits(R1, PAPER, laid(32), context).b_cap.value for context in (2048, 8192)]
    assert held[0] / held[1] == pytest.approx(4, rel=1e-3)


def test_latency_limits_over_both_networks() -> None:
    """50 ms: about 15,400 requests over NVLink; 6,400 over InfiniBand, where it binds before memory."""
    terms = Terms(gamma=1.0375)  # 15.23 MB at the busiest rank over 14.68
    found = paper_limits(R1, PAPER, laid(32), 8192, terms)
    assert found.b_slo.value == pytest.approx(15_400, rel=0.02)
    assert found.tpot.value == pytest.approx(28.0e-3, rel=0.01) and found.binds == "capacity"
    assert found.cache_seconds.value == pytest.approx(2.249e-6, rel=1e-3)
    assert found.exchange_seconds.value == pytest.approx(0.479e-6, rel=2e-3)
    slow = paper_limits(R1, replace(PAPER, domain=8), laid(32), 8192, terms)
    assert slow.b_slo.value == pytest.approx(6400, rel=0.02) and slow.binds == "latency"
    assert slow.exchange_seconds.value == pytest.approx(4.309e-6, rel=2e-3)
    assert slow.tpot.value <= 50e-3 < slow.tpot.value + slow.cache_seconds.value + slow.exchange_seconds.value


def test_256_devices_hold_ten_times_the_requests() -> None:
    assert paper_limits(R1, PAPER, laid(256), 8192).b_cap.value == pytest.approx(74_672, rel=0.01)
    assert not paper_limits(R1, PAPER, laid(256), 8192).saturated


def test_intensities_of_decode_attention() -> None:
    """Table III: groups of query heads for GQA; with the rope part 241.8 for MLA, 1/tp of it under tp."""
    layout = laid(8)
    assert attention_intensity(R1.layers[0].attention, layout) == pytest.approx(241.8, abs=0.05)
    assert attention_intensity(R1.layers[0].attention, laid(8, 8)) == pytest.approx(241.8 / 8, abs=0.01)
    assert attention_intensity(R1.layers[0].attention, laid(8, kv="fp8-scaled")) == pytest.approx(424.6, abs=0.1)
    for name, group in {"llama-3.1-70b": 8, "qwen3-235b": 16, "llama-4": 5, "gpt-3": 1}.items():
        assert attention_intensity(model(name)[1].layers[0].attention, layout) == group


def test_more_bandwidth_is_never_slower_and_more_memory_never_holds_less() -> None:
    times, held = [], []
    for factor in (0.5, 1, 2, 4):
        faster = replace(PAPER, memory_gbps=factor * 8000)
        times.append(paper_limits(R1, faster, laid(32), 8192).weight_seconds.value)
        held.append(paper_limits(R1, replace(PAPER, memory_gb=100 * factor + 50), laid(32), 8192).b_cap.value)
    assert times == sorted(times, reverse=True) and held == sorted(held)


def test_what_is_impossible_is_refused_with_the_term_that_is_too_large() -> None:
    with pytest.raises(SpecError, match=r"784 GB of usable memory and weights take 1,4\d\d GB"):
        paper_limits(R1, PAPER, laid(4), 8192)
    with pytest.raises(SpecError, match=r"reading the weights alone takes 7\.9\d ms of the 5 ms"):
        paper_limits(R1, PAPER, laid(32), 8192, Terms(slo=0.005))
    with pytest.raises(SpecError, match=r"reading the weights and the exchange's latency takes"):
        paper_limits(R1, PAPER, laid(32), 8192, Terms(slo=0.00804))
    with pytest.raises(SpecError, match=r"no links between its domains of 1: .* network_gbps"):
        paper_limits(R1, replace(device("rtx-4090"), memory_gb=300), laid(8), 8192, Terms(slo=1))
    with pytest.raises(SpecError, match="gamma must be from 1"):
        Terms(gamma=0.5)
    with pytest.raises(SpecError, match="context must be from 1"):
        paper_limits(R1, PAPER, laid(32), 0)
