"""The exchange's bytes and times: published simulations, Monte Carlo, exact link loads of tori, and what must hold."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from coterie.planner.network import (
    FP8_ROW,
    Exchange,
    Link,
    all_to_all,
    busiest_pair,
    circuit_hops,
    distinct,
    ranks_per_domain,
    torus_load,
    torus_sides,
)
from coterie.spec import ModelSpec, SpecError
from coterie.spec.hardware import HardwareSpec

B200 = HardwareSpec(
    name="B200", kind="gpu", bf16_tops=2250, memory_gb=192, memory_gbps=8000, scaleup_gbps=900, domain=32,
    network_gbps=100,
)  # fmt: skip
H800 = replace(B200, name="H800", scaleup_gbps=160, domain=8, network_gbps=50)
V3 = Exchange(tokens_per_rank=128, hidden=7168, top_k=8, ranks=32, experts=256)


def test_the_published_simulation_of_one_exchange() -> None:
    """arXiv 2507.15465 v3, section VII: 17.65 us on NVLink, 151.8 us on XDR; 15.23 MB at the busiest rank."""
    busiest = replace(V3, gamma=15.23 / 14.22)
    nvlink = all_to_all(busiest, B200)
    assert nvlink.up_bytes == pytest.approx(15.23e6, rel=0.005)
    assert nvlink.dispatch == pytest.approx(17.65e-6, rel=0.01) and nvlink.bound == "scale-up"
    xdr = all_to_all(busiest, replace(B200, domain=8), Link(only_network=True))
    assert xdr.dispatch == pytest.approx(151.8e-6, rel=0.01) and xdr.bound == "network"


def test_distinct_destinations_are_those_of_the_formula() -> None:
    expected = {2: 1.99, 4: 3.60, 8: 5.25, 16: 6.45, 18: 6.61, 32: 7.18, 64: 7.58}
    assert {places: round(distinct(places, 8), 2) for places in expected} == expected
    assert distinct(1, 8, 256, 8, 4) == 1 and distinct(256, 8, 256) == pytest.approx(8)


@pytest.mark.parametrize("places", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("groups, kept", [(1, 1), (8, 4)])
def test_distinct_destinations_against_monte_carlo(places: int, groups: int, kept: int) -> None:
    rng = np.random.default_rng(places)
    score = rng.random((5000, groups, 256 // groups))
    if groups > 1:
        lost = np.argsort(rng.random((5000, groups)), 1)[:, kept:]
        np.put_along_axis(score, lost[:, :, None], -1.0, 1)
    chosen = np.argpartition(-score.reshape(5000, 256), 8, 1)[:, :8] // (256 // places)
    hit = np.zeros((5000, places), bool)
    np.put_along_axis(hit, chosen, True, 1)
    assert distinct(places, 8, 256, groups, kept) == pytest.approx(hit.sum(1).mean(), rel=0.015)


def link_loads(sides: tuple[int, ...], hot: float) -> float:
    """Busiest directed link if every node sends one unit, evenly or `hot` parts of the even share to node 0."""
    nodes = list(itertools.product(*map(range, sides)))
    others = (len(nodes) - hot) / (len(nodes) - 1)
    loads: Counter[tuple[tuple[int, ...], int, int]] = Counter()
    for source, goal in itertools.product(nodes, nodes):
        part = (others if any(goal) else hot) / len(nodes)
        place = list(source)
        for axis, side in enumerate(sides):
            ahead = (goal[axis] - place[axis]) % side
            both = [1, -1] if 2 * ahead == side else [1 if 2 * ahead < side else -1]
            for step in both:
                walk = place[axis]
                while walk != goal[axis]:
                    loads[(*place[:axis], walk, *place[axis + 1 :]), axis, step] += part / len(both)  # type: ignore[index]
                    walk = (walk + step) % side
            place[axis] = goal[axis]
    return max(loads.values())


@pytest.mark.parametrize("sides", [(4, 4), (4, 4, 4), (8, 8), (5, 5), (8, 4), (8, 4, 2), (2, 2)])
@pytest.mark.parametrize("hot", [1.0, 1.2, 3.0])
def test_the_torus_formula_is_the_busiest_link(sides: tuple[int, ...], hot: float) -> None:
    assert torus_load(sides, hot) == pytest.approx(link_loads(sides, hot))


@pytest.mark.parametrize(
    "topology, per_direction, ranks, rate", [("torus2d", 200, 256, 25), ("torus2d", 400, 256, 50),
                                             ("torus3d", 600, 64, 200), ("torus3d", 600, 512, 100)]
)  # fmt: skip
def test_known_rates_of_tori(topology: str, per_direction: float, ranks: int, rate: float) -> None:
    """V k / (8 b): v5e 16 x 16, v6e 16 x 16, v5p 4 x 4 x 4 and 8 x 8 x 8, GB/s for each chip."""
    pod = replace(B200, topology=topology, scaleup_gbps=per_direction, domain=8960)
    sent = 128 * 8 * 7168 * 2
    assert sent / all_to_all(replace(V3, ranks=ranks), pod, Link(alpha=0)).dispatch == pytest.approx(rate * 1e9)


def test_a_torus_is_slower_than_a_switch_and_worse_the_larger() -> None:
    """The seed's advice, a 3D torus where communication dominates, is backwards."""
    for ranks in (8, 64, 512):
        sent = replace(V3, ranks=ranks)
        torus = all_to_all(sent, replace(B200, topology="torus3d", domain=4096)).seconds
        assert torus >= all_to_all(sent, replace(B200, domain=4096)).seconds
    small, large = (
        all_to_all(replace(V3, ranks=ranks), replace(B200, topology="torus3d", domain=4096)) for ranks in (64, 512)
    )
    assert large.dispatch > 1.8 * small.dispatch


def test_sides_are_as_even_as_they_can_be() -> None:
    assert torus_sides(64, 3) == (4, 4, 4) and torus_sides(32, 2) == (8, 4) and torus_sides(7, 2) == (7, 1)


def test_a_mesh_uses_its_links_to_the_ranks_that_take_part() -> None:
    mi300 = replace(B200, topology="mesh", scaleup_gbps=448, domain=8)
    per_peer = 128 * 7168 * 2
    for ranks in (2, 4, 8):
        seconds = all_to_all(replace(V3, ranks=ranks), mi300, Link(alpha=0)).dispatch
        assert seconds == pytest.approx(per_peer * 8 / ranks / 64e9)


@pytest.mark.parametrize("ranks, tokens", [(8, 128), (8, 1024), (16, 256)])
def test_the_busiest_pair_against_monte_carlo(ranks: int, tokens: int) -> None:
    rng, busiest = np.random.default_rng(ranks), []
    for _ in range(12):
        chosen = np.argpartition(rng.random((ranks * tokens, 64)), 8, 1)[:, :8] // (64 // ranks)
        source = np.repeat(np.arange(ranks), tokens * 8)
        rows = np.bincount(source * ranks + chosen.ravel(), minlength=ranks * ranks).reshape(ranks, ranks)
        busiest.append(rows[~np.eye(ranks, dtype=bool)].max() / (tokens * 8 / ranks))
    sent = Exchange(tokens_per_rank=tokens, hidden=1, top_k=8, ranks=ranks, experts=64)
    assert busiest_pair(sent) == pytest.approx(np.mean(busiest), abs=0.05)
    assert busiest_pair(replace(sent, gamma=3.0)) > 3
    mesh = replace(B200, topology="mesh", domain=ranks)
    noisy = all_to_all(replace(sent, gamma_pair=1.5), mesh, Link(alpha=0)).dispatch
    assert noisy == pytest.approx(1.5 * all_to_all(sent, mesh, Link(alpha=0)).dispatch)


def test_a_row_once_per_node_saves_bytes_of_the_network() -> None:
    sent = replace(V3, ranks=64, groups=8, kept_groups=4, bytes_out=FP8_ROW)
    by_form = {form: all_to_all(replace(sent, form=form), H800) for form in ("copies", "rank", "node")}
    row = 128 * 7168 * FP8_ROW
    assert by_form["node"].net_bytes == pytest.approx(row * distinct(8, 8, 256, 8, 4) * 7 / 8)
    assert by_form["copies"].net_bytes == pytest.approx(row * 8 * 7 / 8)
    assert by_form["node"].net_bytes < by_form["rank"].net_bytes < by_form["copies"].net_bytes
    assert by_form["node"].dispatch < by_form["rank"].dispatch < by_form["copies"].dispatch
    serial = all_to_all(replace(sent, form="node"), H800, Link(pipelined=False))
    assert serial.dispatch > by_form["node"].dispatch
    exact = all_to_all(replace(sent, form="node", reduced=False), H800)
    assert exact.back_net_bytes == pytest.approx(128 * 7168 * 2 * 8 * 7 / 8)
    assert exact.back_net_bytes > by_form["node"].back_net_bytes


def test_bytes_of_two_stages_against_monte_carlo() -> None:
    """16 ranks on 2 nodes: rows over the rail and rows passed on inside, counted one by one."""
    rng, ranks, per_node = np.random.default_rng(1), 16, 8
    nodes, tokens = ranks // per_node, 400
    wide = net = 0
    for source in range(ranks):
        chosen = np.argsort(rng.random((tokens, 256)), 1)[:, :8] // (256 // ranks)
        for row in chosen:
            goals = set(row.tolist())
            net += len({goal // per_node for goal in goals} - {source // per_node})
            wide += sum(goal % per_node != source % per_node for goal in goals)
    sent = Exchange(tokens_per_rank=tokens, hidden=1, top_k=8, ranks=ranks, experts=256, form="node", bytes_out=1)
    transfer = all_to_all(sent, replace(B200, domain=per_node))
    assert transfer.nodes == nodes
    assert transfer.net_bytes == pytest.approx(net / ranks, rel=0.01)
    assert transfer.up_bytes == pytest.approx(wide / ranks, rel=0.01)


@pytest.mark.parametrize("topology", ["switch", "mesh", "torus2d", "torus3d", "ocs"])
@pytest.mark.parametrize("form", ["copies", "rank", "node"])
def test_more_bandwidth_is_never_slower_and_more_skew_never_faster(topology: str, form: str) -> None:
    hw = replace(B200, topology=topology, domain=8)
    for ranks in (8, 64):
        sent = replace(V3, ranks=ranks, form=form)
        plain = all_to_all(sent, hw).seconds
        assert all_to_all(sent, replace(hw, scaleup_gbps=1800, network_gbps=200)).seconds <= plain
        assert all_to_all(replace(sent, gamma=2.0), hw).seconds >= plain
        assert all_to_all(replace(sent, tokens_per_rank=256), hw).seconds >= plain
        assert all_to_all(sent, hw, Link(oversubscription=2)).seconds >= plain


def test_circuits_of_a_complete_graph_are_a_mesh_and_fewer_cost_hops() -> None:
    assert circuit_hops(8, 7) == 1 and circuit_hops(1, 4) == 0
    assert circuit_hops(64, 6) == pytest.approx((6 + 30 * 2 + 27 * 3) / 63)
    assert circuit_hops(5, 2) == pytest.approx(1.5)
    pods = replace(B200, topology="ocs", domain=64)
    fixed = all_to_all(replace(V3, ranks=64), pods, Link(alpha=0)).dispatch
    assert all_to_all(replace(V3, ranks=64), pods, Link(alpha=0, duty=0.5)).dispatch == pytest.approx(1.5 * fixed)


def test_domains_are_filled_evenly_and_one_rank_sends_nothing() -> None:
    assert ranks_per_domain(256, replace(B200, domain=72)) == 64
    assert all_to_all(replace(V3, ranks=1), replace(B200, scaleup_gbps=0)).seconds == 0


def test_measured_links_replace_the_published_ones() -> None:
    fitted = Link(alpha=19.5e-6, beta=663e9)
    assert all_to_all(V3, B200, fitted).dispatch == pytest.approx(19.5e-6 + 128 * 8 * 31 / 32 * 14336 / 663e9)
    assert all_to_all(V3, B200, Link(share=0.5)).dispatch > all_to_all(V3, B200).dispatch


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(SpecError, match="no network between its domains of 8: use at most 8 ranks"):
        all_to_all(V3, replace(B200, domain=8, network_gbps=0))
    with pytest.raises(SpecError, match="no scale-up links"):
        all_to_all(V3, replace(B200, scaleup_gbps=0))
    with pytest.raises(SpecError, match="gamma"):
        replace(V3, gamma=0.5)
    with pytest.raises(SpecError, match="possible are copies, rank, node"):
        replace(V3, form="twice")
    with pytest.raises(SpecError, match="oversubscription"):
        Link(oversubscription=0.5)


def test_an_exchange_follows_from_a_model() -> None:
    model = ModelSpec.from_hf("src/coterie/data/demo")
    moe = next(model.moe_layers())[1]
    sent = Exchange.of(model, 16, 4)
    assert (sent.hidden, sent.top_k, sent.experts) == (model.hidden_size, moe.top_k, moe.num_experts)
