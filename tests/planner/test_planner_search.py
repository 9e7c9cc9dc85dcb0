"""The search: what fits, what is on the front, what is recommended and why; refusals that say which term it is."""

from dataclasses import replace
from itertools import pairwise

import pytest

from coterie.planner.advice import binding, changes, cost_of, describe, launch, reason, unreachable
from coterie.planner.deploy import deploy
from coterie.planner.devices import device
from coterie.planner.goodput import serve
from coterie.planner.known import known_of
from coterie.planner.layout import Layout, Wish, choose
from coterie.planner.memory import budget
from coterie.planner.models import model
from coterie.planner.own import serve_command
from coterie.planner.search import Busy, Instance, Search, find, front, instance_layouts, within
from coterie.planner.skew import Skew
from coterie.planner.workload import Slo, Workload, draw
from coterie.spec import SpecError

R1 = model("DeepSeek-R1")[1]
LIKE = Layout(devices=32, tp=1, dp=32, ep=32, weights="fp8", kv="bf16")
ASKED = Search(model=R1, hardware=device("b200"), like=LIKE, slo=Slo(ttft=2.0, tpot=0.05), price_hour=4.0)
FOUND = find(ASKED)


def test_every_candidate_uses_no_more_devices_and_fits() -> None:
    for each in FOUND.candidates:
        assert each.devices <= 32 and 1 <= each.batch <= each.b_cap
        load = ASKED.load(None)
        assert budget(R1, ASKED.hardware, each.layout, load).b_cap.value >= each.batch
    assert {each.layout.devices for each in FOUND.candidates} == {4, 8, 16, 32}  # 671 GB do not fit on 2 x 193


def test_the_front_is_what_nothing_beats() -> None:
    for faster, fuller in pairwise(FOUND.front):
        assert faster.per_user > fuller.per_user and faster.per_device < fuller.per_device
    for each in FOUND.candidates:
        assert any(f.per_user >= each.per_user and f.per_device >= each.per_device * (1 - 1e-9) for f in FOUND.front)
    assert front([]) == ()


def test_the_recommendation_keeps_the_slo_with_its_interval_and_is_at_its_edge() -> None:
    safe, bold = FOUND.safe, FOUND.bold
    assert safe is not None and bold is not None
    assert safe.tpot * ASKED.known.tpot <= 0.05 and safe.ttft * ASKED.known.ttft <= 2.0
    assert bold.per_device >= safe.per_device
    for each in FOUND.candidates:
        assert each.per_device <= safe.per_device / 0.98 or not within(each, ASKED, safe=True)
    assert binding(safe, ASKED) in ("B_SLO", "TTFT", "prompts", "queue", "B_cap")


@pytest.mark.parametrize(
    ("name", "hw", "devices", "tpot"),
    [("DeepSeek-V3", "h100", 16, 0.05), ("DeepSeek-V3", "h200", 16, 0.03), ("Qwen3-235B-A22B", "h100", 8, 0.05),
     ("DeepSeek-R1", "b200", 8, 0.05), ("Llama-3.1-405B", "h100", 16, 0.05)],
)  # fmt: skip
def test_what_is_left_out_would_not_have_been_better(name: str, hw: str, devices: int, tpot: float) -> None:
    """Also where one instance takes two domains, as 16 x H100 for V3: there no layout has everything inside one."""
    spec, hardware = model(name)[1], device(hw)
    like = Layout(devices=devices, tp=1, dp=devices, ep=1, weights="bf16" if name.startswith("Llama") else "fp8")
    asked = Search(model=spec, hardware=hardware, like=like, slo=Slo(ttft=3.0, tpot=tpot), apart=False,
                   known=known_of(spec, hardware, like))  # fmt: skip
    usual, every = find(asked), find(replace(asked, every=True))
    assert set(usual.candidates) <= set(every.candidates)
    assert (usual.bold is None) == (every.bold is None)
    if usual.bold is not None and every.bold is not None:
        assert usual.bold.per_device >= 0.95 * every.bold.per_device
    assert min(each.tpot for each in usual.front) <= 1.05 * min(each.tpot for each in every.front)


def test_without_limits_memory_or_prompts_bind() -> None:
    free = replace(ASKED, slo=Slo())
    safe = find(free).safe
    assert safe is not None
    if safe.prefill is None:
        assert binding(safe, free) == "B_cap"


def test_littles_law_of_the_closed_form() -> None:
    for each in FOUND.candidates:
        if each.prefill is None:
            streams = each.rate / each.instances * (each.ttft + (each.osl - 1) * each.tpot)
            assert streams == pytest.approx(each.batch, rel=1e-6)
        else:
            assert each.rate <= each.instances * each.batch / (each.osl * each.tpot) * (1 + 1e-9)


def test_pods_and_one_group_are_both_looked_at() -> None:
    shapes = {(each.instances, each.layout.devices) for each in FOUND.candidates if each.prefill is None}
    assert {(1, 32), (2, 16), (4, 8)} <= shapes


def test_a_narrower_cache_never_fits_fewer_and_faster_memory_is_never_slower() -> None:
    instance = Instance(ASKED, LIKE)
    narrow = Instance(ASKED, replace(LIKE, kv="fp8"))
    assert narrow.b_cap > instance.b_cap and narrow.at(8192, 512).tpot <= instance.at(8192, 512).tpot
    quick = Instance(replace(ASKED, hardware=replace(ASKED.hardware, memory_gbps=16000.0)), LIKE)
    assert quick.at(8192, 512).tpot < instance.at(8192, 512).tpot
    longer = Instance(replace(ASKED, isl=16384), LIKE)
    assert longer.at(8192, 512).tpot > instance.at(8192, 512).tpot


def test_skew_slows_and_balance_helps() -> None:
    skewed = replace(ASKED, skew=Skew.parse("zipf:0.6"))
    balanced = replace(skewed, placement="balanced")
    even, slow, cured = (Instance(each, LIKE).at(8192, 4096).tpot for each in (ASKED, skewed, balanced))
    assert even < cured < slow
    busy = Busy(skewed, LIKE)
    assert busy(100.0)[0] > busy(1e6)[0] > 1.5 and busy(1.0)[1] == pytest.approx(8 / 256)


def test_changes_are_tried_and_sorted() -> None:
    assert FOUND.safe is not None
    found = changes(FOUND.safe, ASKED)
    assert found == sorted(found, key=lambda change: -change.factor) and all(each.factor > 1.01 for each in found)
    texts = [each.text for each in found]
    assert "fp4 weights" in texts  # B200 has the unit
    assert not any("fp4" in each.text for each in changes(FOUND.safe, replace(ASKED, hardware=device("h200"))))


def test_cost_counts_all_devices() -> None:
    assert FOUND.safe is not None
    cost = cost_of(FOUND.safe, ASKED)
    tokens = FOUND.safe.per_device * FOUND.safe.devices
    assert cost.per_million == pytest.approx(4.0 * FOUND.safe.devices / 3600 / tokens * 1e6)
    assert cost.joules == pytest.approx(ASKED.hardware.watts / FOUND.safe.per_device)


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(SpecError, match=r"does not fit on 2 x B200.* GB a device without any cache, of 193\.3"):
        find(ASKED, 2)


@pytest.mark.parametrize(
    "slo, words", [(Slo(tpot=0.001), "layer constant alone is"), (Slo(ttft=0.001), "the prompt of 4096 tokens alone")]
)
def test_an_impossible_slo_says_which_term_alone_exceeds_it(slo: Slo, words: str) -> None:
    asked = replace(ASKED, slo=slo)
    found = find(asked)
    assert found.safe is None and found.bold is None
    assert words in unreachable(found, asked)


def test_the_launch_command_starts_what_was_found() -> None:
    assert FOUND.safe is not None
    commands = launch(FOUND.safe, "R1", ASKED)
    assert len(commands) == (1 if FOUND.safe.prefill is None else 2)
    assert all("--enable-dp-attention" in command for command in commands)
    assert reason(FOUND.safe, FOUND, ASKED).startswith("most tokens a second") and "x (tp" in describe(FOUND.safe)


LINKED = replace(device("8592+"), scaleup_gbps=60.0, domain=4)


@pytest.mark.parametrize(
    ("name", "count", "wish", "formats"),
    [
        ("DeepSeek-V2-Lite", 1, Wish(weights="int8"), ("int8", "int8", "bfloat16", "float32")),
        ("DeepSeek-V2-Lite", 4, Wish(weights="int4", attention="bf16", kv="int8"), ("int4", "bf16", "int8", "float32")),
        ("Qwen3-30B-A3B", 2, Wish(weights="fp4", attention="int4", exchange="bfloat16"),
         ("mxfp4", "int4", "bfloat16", "bfloat16")),
        ("Qwen3-30B-A3B", 2, Wish(weights="fp8", attention="int8"), ("fp8", "int8", "bfloat16", "float32")),
        ("Llama-3.1-8B", 2, Wish(), ("bf16", "bf16", "bfloat16", "float32")),
        ("DeepSeek-R1", 4, Wish(), ("auto", "auto", "bfloat16", "float32")),  # fp8 as the files have it
    ],
)  # fmt: skip
def test_on_a_cpu_the_command_starts_the_layout_that_was_planned(
    name: str, count: int, wish: Wish, formats: tuple[str, ...]
) -> None:
    from coterie.cli.common import engine_config
    from coterie.cli.parallel import parallel_config
    from coterie.cli.serve import serve

    spec = model(name)[1]
    like = replace(choose(spec, LINKED, count, wish), redundant=0)
    asked = Search(model=spec, hardware=LINKED, like=like, slo=Slo(), placement="balanced", overlap=True)
    found = find(asked)
    for chosen in {each.layout: each for each in (found.candidates[-1], found.safe) if each}.values():
        layout = chosen.layout
        (command,) = launch(chosen, "folder", asked)
        words = command.split()
        assert words[:3] == ["coterie", "serve", "folder"] and chosen.prefill is None
        values = serve.make_context("serve", words[2:]).params
        config, parallel = engine_config(values), parallel_config(values)
        placement = parallel.placement(spec)
        held = config.quant
        assert (held.experts, held.attention, config.kv_cache_dtype, config.exchange_dtype) == formats
        assert held.head == "bf16" and config.chunked_prefill_size == chosen.chunk
        assert config.max_running_requests * layout.dp >= chosen.batch
        assert (parallel.num_ranks, parallel.tp) == (layout.devices, layout.tp)
        assert (parallel.rebalance_steps > 0) == (layout.ep > 1)
        assert (parallel.overlap == "on") == (layout.dp > 1 and layout.ep > 1)
        if any(spec.moe_layers()):
            assert placement.num_slots == next(spec.moe_layers())[1].num_experts + layout.redundant


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(weights="fp4"), "attention in bf16, int8, int4 or as the files have it, not in fp4"),
        (Wish(weights="fp8"), "not in fp8"),
        (Wish(kv="fp8"), "cache is in bf16 or int8"),
    ],
)
def test_what_this_engine_lacks_is_refused_on_a_cpu(wish: Wish, words: str) -> None:
    lite = model("DeepSeek-V2-Lite")[1]
    asked = Search(model=lite, hardware=LINKED, like=choose(lite, LINKED, 1, wish), slo=Slo())
    with pytest.raises(SpecError, match=words):
        find(asked)
    with pytest.raises(SpecError, match="drafts no tokens"):
        find(replace(asked, like=choose(lite, LINKED, 1), draft=1))


def test_a_layout_that_this_engine_lacks_is_explained() -> None:
    lite = model("DeepSeek-V2-Lite")[1]
    asked = Search(model=lite, hardware=LINKED, like=choose(lite, LINKED, 4, Wish(weights="int8")), slo=Slo())
    with pytest.raises(SpecError, match="experts lie whole on all ranks"):
        find(replace(asked, fixed=(("ep", 2), ("tp", 4))))
    dense = model("Llama-3.1-8B")[1]
    like = choose(dense, LINKED, 4)
    asked = replace(asked, model=dense, like=like)
    assert {each.layout.dp for each in find(asked).candidates} == {1}


def test_several_machines_are_started_by_torchrun() -> None:
    lite = model("DeepSeek-V2-Lite")[1]
    far = replace(LINKED, network_gbps=12.5, domain=2)
    words = serve_command(choose(lite, far, 4, Wish(weights="int8")), lite, far, "folder")
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"] and "--ep" not in words


def test_redundant_experts_are_those_that_divide() -> None:
    odd = replace(ASKED, like=Layout(devices=24, tp=1, dp=24, ep=24, redundant=8))
    for layout in instance_layouts(replace(odd, every=True), 24):
        assert (256 + layout.redundant) % layout.ep == 0 and layout.redundant >= 8


@pytest.mark.parametrize("values", [{"hit": 1.0}, {"isl": -1}, {"osl": 0}, {"price_hour": -1.0}])
def test_absurd_questions_are_refused(values: dict) -> None:
    with pytest.raises(SpecError):
        replace(ASKED, **values)


@pytest.mark.parametrize("layout", [Layout(devices=8, tp=1, dp=8, ep=8), Layout(devices=8, tp=4, dp=2, ep=1)])
def test_the_closed_form_of_a_candidate_is_what_the_simulation_gives(layout: Layout) -> None:
    asked = replace(ASKED, like=layout)
    each = Instance(asked, layout).at(8192, 32)
    served = serve(draw(Workload(rate=each.rate, isl=4096, osl=1024, requests=600)), deploy(asked), each.rate)
    assert served.batch * layout.dp == pytest.approx(32, rel=0.15)
    assert float(served.tpot.mean()) == pytest.approx(each.tpot, rel=0.15)
    assert float(served.ttft.mean()) == pytest.approx(each.ttft, rel=0.15)


def test_layouts_that_the_links_do_not_allow_are_left_out() -> None:
    """Sockets without links between devices: each serves for itself; experts over both would need links."""
    lite = model("DeepSeek-V2-Lite")[1]
    asked = Search(model=lite, hardware=device("8592+"), slo=Slo(),
                   like=Layout(devices=2, tp=1, dp=2, ep=2, weights="int8"))  # fmt: skip
    assert {(each.instances, each.layout.devices) for each in find(asked).candidates} == {(2, 1)}
    with pytest.raises(SpecError, match="links"):
        find(replace(asked, fixed=(("ep", 2),)))


@pytest.mark.parametrize(
    "hardware, streams, isl, osl, published",
    [("h200", 32, 1024, 1024, 23.31), ("h200", 8, 8192, 1024, 14.37), ("b200", 16, 1024, 8192, 12.84)],
)
def test_a_candidate_has_the_time_of_published_runs(
    hardware: str, streams: int, isl: int, osl: int, published: float
) -> None:
    """SGLang, DeepSeek-R1, tp 8: runs that the fit has seen; the search must not lose what the fit knows."""
    layout = Layout(devices=8, tp=8, dp=1, ep=1)
    known = known_of(R1, device(hardware), layout, "sglang")
    asked = Search(model=R1, hardware=device(hardware), like=layout, slo=Slo(), isl=isl, osl=osl, known=known)
    assert Instance(asked, layout).at(8192, streams).tpot * 1e3 == pytest.approx(published, rel=0.12)
