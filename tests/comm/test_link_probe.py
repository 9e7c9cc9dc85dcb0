"""The probe of the links and the form that follows from its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.comm.local import LocalTransport
from coterie.comm.mesh import Mesh
from coterie.comm.probe import Links, Traffic, choose, expected_seconds, probe_links

SLOW = Links(latency=1e-3, inside=400e6, between=200e6 / 8 / 4)
FAST = Links(latency=1e-3, inside=400e6, between=300e6)
PREFILL = Traffic(out_bytes=4 * 2048, back_bytes=4 * 2048, top_k=8, tokens=512, small=8)


def finish(generators: list) -> list:
    """Drive local ranks to their ends."""
    results, live = [None] * len(generators), dict(enumerate(generators))
    while live:
        for index, generator in list(live.items()):
            try:
                next(generator)
            except StopIteration as end:
                results[index] = end.value
                del live[index]
    return results


def meshes(nodes: list[int]) -> list[Mesh]:
    return [Mesh.of(transport, nodes) for transport in LocalTransport.group(len(nodes))]


def test_all_ranks_learn_the_same_numbers() -> None:
    ranks = meshes([0, 0, 1, 1])
    found = finish([probe_links(mesh, 1 << 12) for mesh in ranks])
    assert len(set(found)) == 1
    assert found[0].latency > 0 and found[0].inside > 0 and found[0].between > 0
    assert ranks[0].bytes_by_hop()[1] > 5 * (1 << 12), "the probe went between nodes"
    alone = finish([probe_links(mesh, 1 << 12) for mesh in meshes([0, 0])])[0]
    assert alone.between == alone.inside


def test_a_slow_link_is_used_once_per_node_and_a_fast_one_directly() -> None:
    mesh = meshes([0] * 4 + [1] * 4)[0]
    policy, chosen = choose(mesh, SLOW, PREFILL)
    assert policy.sized == "hierarchical" and chosen[0].value == "hierarchical"
    assert "6.2 MB/s between nodes" in chosen[0].reason and "flat" in chosen[0].reason
    assert choose(mesh, FAST, PREFILL)[0].sized == "flat"
    assert choose(mesh, SLOW, PREFILL, exact=False)[0].sized == "hierarchical-reduced"


def test_short_steps_use_fixed_messages_where_latency_rules() -> None:
    mesh = meshes([0, 0, 1, 1])[0]
    far = Links(latency=10e-3, inside=400e6, between=300e6)
    assert choose(mesh, far, PREFILL)[0].capacity == 8
    policy, chosen = choose(mesh, Links(1e-4, 1e9, 1e5), PREFILL)
    assert policy.capacity == 0 and chosen[1].value == policy.sized


def test_expected_bytes() -> None:
    """Uniform top-8 between two nodes of four: 2.6 rows a token reach other ranks' nodes flat, 0.996 by node."""
    mesh = meshes([0] * 4 + [1] * 4)[0]
    wide = Links(0.0, 1e30, 1.0)
    row = (4 * (2048 + 16) + 4 * 2048) / 2
    flat = expected_seconds("flat-reduced", mesh, wide, PREFILL) / (512 * row)
    tiered = expected_seconds("hierarchical-reduced", mesh, wide, PREFILL) / (512 * row)
    np.testing.assert_allclose([flat / 2, tiered / 2], [2.63, 0.996], atol=0.02)


def test_narrow_rows_take_less_and_may_change_the_choice() -> None:
    """Out a quarter of the bytes, back a half: the return, one row for each expert, outweighs the rest."""
    mesh = meshes([0] * 4 + [1] * 4)[0]
    narrow = Traffic(out_bytes=2048 + 256, back_bytes=2 * 2048, top_k=8, tokens=512, small=8)
    wide, wire = Links(0.0, 1e30, 1.0), 512 * 8 / 2
    for form, out in (("flat", 2.63), ("hierarchical", 0.996)):
        for traffic, packed in ((PREFILL, 4 * 2048 + 32), (narrow, 2304 + 32)):
            found = expected_seconds(form, mesh, wide, traffic)
            np.testing.assert_allclose(found, 512 * out * packed + wire * traffic.back_bytes, rtol=0.005)
    assert expected_seconds("flat", mesh, SLOW, narrow) < 0.5 * expected_seconds("flat", mesh, SLOW, PREFILL)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]])
def test_one_node_or_unequal_nodes_have_no_hierarchy(nodes: list[int]) -> None:
    mesh = meshes(nodes)[0]
    policy, chosen = choose(mesh, SLOW, PREFILL)
    assert policy.sized == "flat" and "no hierarchy" in chosen[0].reason
