"""Times of a step: counts against the configuration's own, both forms of MLA, monotonicity, overlap, drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.comm.travel import Travel
from coterie.kernels.native import NativeKernels
from coterie.planner.cost import Efficiency, decode_step, mixed_step, prefill_step, price
from coterie.planner.layout import WEIGHT_BYTES, Layout, WeightName
from coterie.planner.memory import cache_row_bytes
from coterie.planner.network import Exchange, all_to_all
from coterie.planner.ops import Op, Point, expected_hit, step_ops
from coterie.planner.own import EXPERTS
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec, MoESpec
from coterie.spec.parallel import ExchangeDtype
from coterie.spec.weights import MatrixSpec, QuantPlan

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
V3 = ModelSpec.from_hf(CONFIGS / "deepseek-v3.json")
QWEN = ModelSpec.from_hf(CONFIGS / "qwen3-235b-a22b.json")
H200 = HardwareSpec(name="H200", kind="gpu", bf16_tops=989, fp8_tops=1979, memory_gb=141, memory_gbps=4800,
                    scaleup_gbps=450, domain=8, network_gbps=50)  # fmt: skip
ONE = Layout(devices=1, tp=1, dp=1, ep=1, weights="bf16")
WIDE = Layout(devices=32, tp=1, dp=32, ep=32)
POINT = Point(batch=64, context=4096)


def find(model: ModelSpec, layout: Layout, name: str, *points: Point | None, absorbed: bool = False) -> Op:
    return next(op for op in step_ops(model, layout, *points, absorbed=absorbed) if op.name == name)


@pytest.mark.parametrize("model", [V3, QWEN], ids=["v3", "qwen3"])
def test_a_token_multiplies_the_active_parameters(model: ModelSpec) -> None:
    ops = step_ops(model, ONE, Point(batch=1, context=1))
    products = sum(op.operations * op.times for op in ops if op.kind == "product")
    assert products == pytest.approx(model.flops_per_token(0), rel=1e-12)


def test_a_large_batch_reads_every_weight_but_the_embedding() -> None:
    ops = step_ops(V3, ONE, Point(batch=1e5, context=1))
    nbytes = sum(op.nbytes * op.times for op in ops if op.kind == "product")
    matrices = V3.num_parameters - V3.vocab_size * V3.hidden_size
    assert nbytes == pytest.approx(2 * matrices, rel=1e-4)


def test_absorbed_attention_of_a_token_in_a_layer() -> None:
    op = find(V3, ONE, "attention of streams", Point(batch=1, context=1))
    assert (op.operations, op.nbytes) == (278528, 1152)


def test_prompts_take_the_expanded_form() -> None:
    point = Point(batch=1, context=1024)
    expanded = find(V3, ONE, "attention of prompts", None, point)
    absorbed = find(V3, ONE, "attention of prompts", None, point, absorbed=True)
    assert absorbed.operations / expanded.operations == pytest.approx((576 + 512) / (192 + 128))
    assert expanded.operations == 2 * 128 * (192 + 128) * 1024 * 1025 / 2
    later = find(V3, ONE, "attention of prompts", None, replace(point, past=1024))
    rebuilt = 2 * 1024 * 512 * 128 * (128 + 128)
    assert later.operations - rebuilt == 2 * 128 * (192 + 128) * 1024 * (1024 + 1025 / 2)


def test_tensor_parallelism_leaves_the_latent_whole_and_cuts_the_heads() -> None:
    tp = Layout(devices=8, tp=8, dp=1, ep=8, weights="bf16")
    one, eight = (find(V3, layout, "attention of streams", POINT) for layout in (ONE, tp))
    assert eight.nbytes == one.nbytes
    assert eight.operations == one.operations / 8
    one, eight = (find(QWEN, layout, "attention of streams", POINT) for layout in (ONE, tp))
    assert eight.nbytes == one.nbytes / 4  # four key-value heads, each on two ranks


def test_few_tokens_hit_few_experts() -> None:
    ffn = V3.layers[-1].ffn
    assert isinstance(ffn, MoESpec)
    assert expected_hit(ffn, ONE, 1) == pytest.approx(8)
    assert expected_hit(ffn, ONE, 4) / 256 == pytest.approx(0.119, abs=1e-3)
    assert expected_hit(ffn, replace(WIDE, redundant=32), 1e6) == pytest.approx(9)


def test_rows_of_the_cache() -> None:
    stream = V3.layers[0].attention.cache_streams[0]
    assert [cache_row_bytes(stream, kind) for kind in ("bf16", "fp8", "fp8-scaled")] == [1152, 576, 656]


def test_more_bandwidth_or_rate_is_never_slower_and_context_never_faster() -> None:
    base = decode_step(V3, H200, WIDE, POINT).seconds
    for name in ("memory_gbps", "bf16_tops", "fp8_tops", "network_gbps"):
        assert decode_step(V3, replace(H200, **{name: 2 * getattr(H200, name)}), WIDE, POINT).seconds <= base
    longer = [decode_step(V3, H200, WIDE, replace(POINT, context=length)).seconds for length in (1, 512, 4096, 65536)]
    assert longer == sorted(longer)


@given(
    batch=st.floats(1, 1e5), context=st.floats(1, 1e5), gamma=st.floats(1, 8),
    layout=st.sampled_from([WIDE, Layout(devices=8, tp=8, dp=1, ep=1), Layout(devices=16, tp=2, dp=8, ep=4)]),
)  # fmt: skip
def test_any_step_has_a_time_that_grows_with_its_load(
    batch: float, context: float, gamma: float, layout: Layout
) -> None:
    point = Point(batch=batch, context=context, gamma=gamma)
    seconds = [
        step(V3, H200, layout, place).seconds
        for step in (decode_step, prefill_step)
        for place in (point, replace(point, batch=2 * batch))
    ]
    assert 0 < seconds[0] <= seconds[1] and 0 < seconds[2] <= seconds[3]


def test_a_mixed_step_costs_at_most_both_and_at_least_either() -> None:
    prompt = Point(batch=1, context=512)
    decode, prefill = decode_step(V3, H200, WIDE, POINT), prefill_step(V3, H200, WIDE, prompt)
    both = mixed_step(V3, H200, WIDE, (POINT, prompt))
    assert max(decode.seconds, prefill.seconds) <= both.seconds <= decode.seconds + prefill.seconds


@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp4", "int8", "int4"])
@pytest.mark.parametrize("exchange", ["float32", "bfloat16"])
def test_our_exchange_counts_the_bytes_that_our_engine_sends(weights: WeightName, exchange: ExchangeDtype) -> None:
    """A row once to each rank with one of its experts, in the bytes of the engine's own Travel; each output back."""
    hidden, top_k, ranks = V3.hidden_size, 8, 4
    layout = Layout(devices=ranks, tp=1, dp=ranks, ep=ranks, weights=weights, exchange=exchange)
    message = find(V3, layout, "all-to-all", Point(batch=32, context=64)).message
    assert message is not None
    form = QuantPlan().format(EXPERTS[weights])  # type: ignore[arg-type]
    assert form is not None
    kernels = NativeKernels(1, "generic")
    gate_up, _ = kernels.allocate(1, MatrixSpec(64, hidden, form, 2), MatrixSpec(hidden, 32, form))
    travel = Travel(kernels, gate_up, rounded=exchange == "bfloat16")
    sent = all_to_all(message, replace(H200, domain=ranks))
    rows, out, back = 8, travel.out_bytes(hidden), travel.back_bytes(hidden)
    assert sent.up_bytes == pytest.approx(rows * message.distinct(ranks) * (ranks - 1) / ranks * out, rel=1e-3)
    assert sent.back_up_bytes == pytest.approx(rows * top_k * (ranks - 1) / ranks * back)
    tiles = find(V3, replace(layout, tiles=True), "all-to-all", Point(batch=32, context=64)).message
    assert tiles is not None and tiles.bytes_out == (2.0 if weights == "bf16" else message.bytes_out)
    group = replace(layout, tp=ranks, dp=1)  # the ranks of one group exchange too, a share of its rows each
    shared = find(V3, group, "all-to-all", Point(batch=32, context=64)).message
    assert shared is not None and shared.tokens_per_rank == 8


def test_overlap_is_the_longer_of_both_computations_and_of_one_with_its_exchange() -> None:
    hw = replace(H200, memory_gbps=1e3, scaleup_gbps=1, domain=4)
    eff = Efficiency(eta_m=1, eta_p=1, alpha=0, beta=1, layer_seconds=0, step_seconds=0)
    message = Exchange(tokens_per_rank=4, hidden=1, top_k=1, ranks=4, bytes_out=1e9, bytes_back=0)
    exchange = Op(name="all-to-all", kind="exchange", layer=0, times=2, message=message, ranks=4)  # 3 s
    for nbytes, wanted in ((1e12, 2 * (1 + 3)), (4e12, 2 * 2 * 4)):
        compute = Op(name="experts", kind="product", layer=0, times=2, nbytes=nbytes)
        assert price((compute, exchange), hw, eff, overlap=True).seconds == pytest.approx(wanted)
    plain = price((compute, exchange), hw, eff)
    assert plain.seconds == pytest.approx(2 * (4 + 3))


def test_drafts_pay_off_where_steps_are_bound_by_constants_and_memory() -> None:
    layout = Layout(devices=8, tp=8, dp=1, ep=1)
    plain = decode_step(V3, H200, layout, Point(batch=1, context=1024))
    draft = decode_step(V3, H200, layout, Point(batch=1, context=1024, draft=1, accept=0.85))
    assert draft.seconds > plain.seconds and draft.tpot < plain.tpot
    assert draft.tokens == pytest.approx(1.85)
    never = decode_step(V3, H200, layout, Point(batch=1, context=1024, draft=1, accept=0))
    assert never.tpot > plain.tpot


def test_formats_change_bytes_by_their_ratio() -> None:
    eight, four = (find(V3, replace(ONE, weights=form), "routed experts", POINT) for form in ("fp8", "fp4"))
    assert eight.nbytes / four.nbytes == pytest.approx(WEIGHT_BYTES["fp8"] / WEIGHT_BYTES["fp4"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch": -1}, "batch must be"),
        ({"batch": 0}, "at least one request"),
        ({"context": float("nan")}, "context"),
        ({"gamma": 0.5}, "gamma must be"), ({"accept": 2}, "accept"), ({"batch": 1e300}, "batch must be"),
    ],
)  # fmt: skip
def test_absurd_points_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Point(**{"batch": 1, "context": 1, **values})  # type: ignore[arg-type]


def test_ranks_beyond_the_domain_need_a_network() -> None:
    with pytest.raises(SpecError, match="network_gbps"):
        decode_step(V3, replace(H200, network_gbps=0), WIDE, POINT)
