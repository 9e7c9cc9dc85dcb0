"""Nodes, rails, classes of hops and what is counted over them."""

from __future__ import annotations

import numpy as np

from coterie.comm.local import LocalTransport
from coterie.comm.mesh import Mesh


def test_rails_join_equal_places() -> None:
    ranks = [Mesh.of(transport, [0, 0, 1, 1, 2, 2], racks=[0, 0, 1]) for transport in LocalTransport.group(6)]
    fourth = ranks[3]
    assert fourth.has_rails and (fourth.num_nodes, fourth.ranks_per_node) == (3, 2)
    assert fourth.node is not None and (fourth.node.rank, fourth.node.size) == (1, 2)
    assert fourth.rail is not None and (fourth.rail.rank, fourth.rail.size) == (1, 3)
    assert fourth.hop_class().tolist() == [1, 1, 0, 0, 2, 2]


def test_bytes_are_counted_by_hop_through_every_group() -> None:
    ranks = [Mesh.of(transport, [0, 0, 1, 1], racks=[0, 1]) for transport in LocalTransport.group(4)]
    rows = np.zeros((6, 10), np.uint8)
    for mesh in ranks:
        counts = [0, 1, 2, 3] if mesh.world.rank == 1 else [0] * 4
        expected = [counts[mesh.world.rank] if source == 1 else 0 for source in range(4)]
        if mesh.world.rank:
            expected[1] = [0, 1, 2, 3][mesh.world.rank]
        mesh.world.all_to_all_v(rows[: sum(counts)], counts, expected)
    assert ranks[1].bytes_by_hop() == [0, 0, 50]
    assert ranks[0].bytes_by_hop() == [0, 0, 0]
    for mesh in ranks:
        assert mesh.node is not None and mesh.rail is not None
        mesh.node.all_gather(np.zeros(4, np.int64))
        mesh.rail.all_gather(np.zeros(1, np.int64))
    assert ranks[1].bytes_by_hop() == [32, 0, 58]


def test_unequal_nodes_have_no_rails() -> None:
    mesh = Mesh.of(LocalTransport.group(3)[0], [0, 0, 1])
    assert not mesh.has_rails and mesh.node is None
