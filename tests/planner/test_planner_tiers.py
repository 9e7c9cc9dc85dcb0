"""CPU servers, experts over tiers and processing in memory: arithmetic, limits, published hybrids, the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coterie.planner.cost import decode_step, price
from coterie.planner.cpu_server import CpuServer
from coterie.planner.devices import device
from coterie.planner.layout import Layout
from coterie.planner.memory import Load
from coterie.planner.models import model
from coterie.planner.ops import Op, Point
from coterie.planner.pim import IDEAL, crossover, hybrid, pim, rivals
from coterie.planner.skew import Skew
from coterie.planner.tiers import Host, TierQuestion, place, split, tier_plan
from coterie.spec.errors import SpecError

V3 = model("v3")[1]
LITE = model("v2-lite")[1]
GPU = replace(device("rtx-4090"), host_link_gbps=25.0)
SERVER = "cpu:channels=8,mts=4800,cores=32,ghz=2.2,isa=amx,sockets=2"
INT4 = Layout(devices=1, tp=1, dp=1, ep=1, weights="int4")


# CPU servers


def test_a_server_is_its_channels_and_its_cores() -> None:
    server = CpuServer.parse(SERVER)
    assert server.socket_gbps == pytest.approx(307.2) and server.memory_gbps == pytest.approx(614.4)
    hw = server.hardware()
    assert hw.bf16_tops == pytest.approx(2 * 32 * 2.2 * 1024 / 1e3) and hw.int8_tops == pytest.approx(2 * hw.bf16_tops)
    assert device(SERVER) == hw and hw.memory_gb == 1024


def test_the_table_and_the_data_sheet_agree() -> None:
    for name, text in (
        ("6454s", "channels=8,mts=4800,cores=32,ghz=2.2"),
        ("6980p", "channels=12,mts=8800,cores=128,ghz=2"),
    ):
        made, row = device(f"cpu:{text},isa=amx"), device(name)
        assert made.memory_gbps == pytest.approx(row.memory_gbps, rel=0.01)
        assert made.bf16_tops == pytest.approx(row.bf16_tops, rel=0.01)


def test_reads_of_the_other_socket_pass_its_links() -> None:
    server = CpuServer.parse(SERVER + ",link_gbps=60")
    far = replace(server, numa="interleaved")
    assert far.memory_gbps == pytest.approx(2 * 120)
    assert replace(far, link_gbps=1000.0).memory_gbps == server.memory_gbps
    assert replace(far, sockets=1).memory_gbps == server.socket_gbps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu:channels=8", "missing mts, cores, ghz"), ("cpu:chanels=8", "there is no 'chanels'"),
        (SERVER.replace("amx", "sse"), "isa of a CPU server is one of"),
        (SERVER.replace("=2.2", "=fast"), "'fast' is not"),
        (SERVER.replace("sockets=2", "sockets=1.5"), "not a whole number"),
        (SERVER.replace("mts=4800", "mts=-1"), "above 0"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        device(text)


# Tiers


def question(batch: float = 1, **changes: object) -> TierQuestion:
    host = Host.of(GPU, device(SERVER))
    asked = TierQuestion(model=V3, hardware=GPU, layout=INT4, host=host, point=Point(batch=batch, context=1000),
                         skew=Skew.parse("uniform"), load=Load(batch=1, isl=1000, osl=1, chunk=512))  # fmt: skip
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_every_expert_lies_somewhere_and_tiers_fill_in_order() -> None:
    asked = question()
    counts = place(V3, GPU, INT4, asked.host, asked.load)
    assert sum(counts) == pytest.approx(256) and counts[0] > 0 and counts[2] == 0
    small = replace(asked.host, ram_gb=100.0, disk_gbps=5.0)
    near, middle, far = place(V3, GPU, INT4, small, asked.load)
    assert near == counts[0] and far > 0 and middle * 58 * 3 * 7168 * 2048 * 0.5625 == pytest.approx(100e9)
    with pytest.raises(SpecError, match="there is no disk"):
        place(V3, GPU, INT4, replace(small, disk_gbps=0.0), asked.load)


def test_what_must_be_near_must_fit() -> None:
    with pytest.raises(SpecError, match="without any routed expert"):
        tier_plan(question(hardware=replace(GPU, memory_gb=8.0)), "hybrid")


def test_reads_by_tier_are_the_expected_hits() -> None:
    shares = np.full(64, 6 / 64)
    for tokens in (1.0, 8.0, 1000.0):
        hits, chosen = split(shares, (16, 32, 16), tokens)
        each = 1 - (1 - 6 / 64) ** tokens
        assert hits == pytest.approx([16 * each, 32 * each, 16 * each]) and sum(chosen) == pytest.approx(1)


def test_heat_puts_choices_near_more_than_reads() -> None:
    even, skewed = tier_plan(question(64), "hybrid"), tier_plan(question(64, skew=Skew.parse("zipf:0.8")), "hybrid")
    assert skewed.chosen[0] > 4 * even.chosen[0]
    saved = [(plan.read[1]) / sum(plan.read) for plan in (even, skewed)]
    assert saved[1] > 0.9 * saved[0]  # a share of choices is not a share of bytes: at 64 tokens most experts are read


def test_a_device_that_holds_all_experts_is_the_plain_step() -> None:
    big = replace(GPU, memory_gb=2000.0)
    plan = tier_plan(question(hardware=big), "stream")
    assert plan.experts[1:] == (0, 0)
    assert plan.cost.seconds == pytest.approx(decode_step(V3, big, INT4, Point(batch=1, context=1000)).seconds)


def test_slower_tiers_never_make_a_step_faster() -> None:
    times = []
    for ram in (400.0, 200.0, 50.0):
        host = replace(question().host, ram_gb=ram, disk_gbps=5.0)
        times.append([tier_plan(question(host=host), how).tpot for how in ("hybrid", "stream")])
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize(
    ("server", "tokens_per_second"),
    [(SERVER, 13.5), (SERVER.replace("sockets=2", "sockets=1"), 8.73),
     ("cpu:channels=12,mts=4800,cores=96,ghz=2.4,isa=avx512", 14.0)],
)  # fmt: skip
def test_published_hybrids_lie_within_the_interval(server: str, tokens_per_second: float) -> None:
    """KTransformers, DeepSeek-V3 and R1 in 4 bits with an RTX 4090 (its tutorial and issue 314)."""
    plan = tier_plan(question(host=Host.of(GPU, device(server))), "hybrid")
    assert tokens_per_second / 1.8 < 1 / plan.tpot < tokens_per_second * 1.8


def test_forms_need_what_they_use() -> None:
    with pytest.raises(SpecError, match="--cpu"):
        tier_plan(question(host=replace(question().host, cpu=None)), "hybrid")
    with pytest.raises(SpecError, match="--link-gbps"):
        tier_plan(question(host=replace(question().host, link_gbps=0.0)), "stream")
    with pytest.raises(SpecError, match="no experts"):
        tier_plan(question(model=model("llama-3.1-8b")[1]), "stream")


# Processing in memory

B200 = device("b200-paper")
WIDE = Layout(devices=32, tp=1, dp=32, ep=32, weights="bf16")
BOTH = (B200, pim(B200))


def test_the_device_has_its_ridge_and_bandwidth() -> None:
    assert BOTH[1].ridge == pytest.approx(8) and BOTH[1].memory_gbps == 4 * B200.memory_gbps
    with pytest.raises(SpecError):
        pim(B200, ridge=0)


def test_pim_helps_only_small_batches_of_a_latent_model() -> None:
    ends = [crossover(model("r1")[1], BOTH, WIDE, length) / 32 for length in (2048, 8192, 16384)]
    assert 32 > ends[0] > ends[1] > ends[2] > 1  # the reference: below 32 requests a device
    for end, length in zip(ends, (2048, 8192, 16384), strict=True):
        for factor, faster in ((0.9, True), (1.1, False)):
            found = rivals(model("r1")[1], BOTH, WIDE, Point(batch=32 * end * factor, context=length))
            assert (found.pim.tpot < found.gpu.tpot) is faster


def test_attention_on_pim_pays_for_grouped_heads_and_not_for_a_latent() -> None:
    latent = rivals(model("r1")[1], BOTH, WIDE, Point(batch=256, context=16384))
    assert latent.hybrid["attention"].tpot == pytest.approx(latent.gpu.tpot)  # 242 operations a byte, far above 8
    layout = Layout(devices=8, tp=8, dp=1, ep=1, weights="bf16")
    grouped = rivals(model("llama-3.1-70b")[1], BOTH, layout, Point(batch=64, context=16384))
    assert grouped.gpu.tpot / grouped.hybrid["attention"].tpot > 2


def test_a_hybrid_takes_the_faster_of_both_for_each_operation() -> None:
    ops = tuple(
        Op(name=name, kind="product", layer=0, times=2, nbytes=1e9, operations=operations)
        for name, operations in (("few", 1e9), ("many", 1e13))
    )
    found = hybrid(ops, BOTH, "all").seconds
    each = [min(price((op,), hw, IDEAL).seconds for hw in BOTH) for op in ops]
    assert found == pytest.approx(sum(each))
    assert found < min(price(ops, hw, IDEAL).seconds for hw in BOTH)


def test_more_bandwidth_never_lowers_the_crossover() -> None:
    lite = Layout(devices=8, tp=1, dp=8, ep=8, weights="bf16")
    ends = [crossover(LITE, (B200, pim(B200, bandwidth=factor)), lite, 4096) for factor in (0.5, 2, 4, 8)]
    assert ends == sorted(ends) and ends[0] == 0
