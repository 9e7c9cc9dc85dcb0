"""Mesh: the ranks of one exchange by node, and how much went over each class of hop.

Nodes hold consecutive ranks. `node` is the group of this rank's node, `rail` the ranks of all nodes with the same place
in their node: traffic between nodes goes along rails, so each rank forwards its share. Both exist only where nodes are
of equal size and there is more than one. `words` is all ranks once more, with connections of their own: counts do not
stand in line behind another micro-batch's rows. Hop classes: 0 inside a node, 1 between nodes, 2 between racks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.comm.transport import Int64, Transport

HOPS = ("inside a node", "between nodes", "between racks")


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """`node_of` and `rack_of` [R]: where each rank is."""

    world: Transport
    words: Transport
    node_of: Int64
    rack_of: Int64
    node: Transport | None = None
    rail: Transport | None = None

    @classmethod
    def of(cls, world: Transport, node_of: Sequence[int] | NDArray[np.integer], racks: Sequence[int] = ()) -> Mesh:
        """The mesh of a world whose ranks lie on nodes `node_of`; `racks` gives the rack of each node (all on one).

        Every rank calls it at the same time: the groups of nodes and rails are made here.
        """
        nodes = np.asarray(node_of, np.int64)
        words = world.subgroup("words", range(world.size))
        racks_of = np.asarray(racks, np.int64)[nodes] if len(racks) else np.zeros_like(nodes)
        sizes = np.bincount(nodes)
        if len(sizes) < 2 or (sizes != sizes[0]).any():
            return cls(world, words, nodes, racks_of)
        own, local = int(nodes[world.rank]), world.rank % int(sizes[0])
        node = world.subgroup(f"node-{own}", [int(rank) for rank in np.flatnonzero(nodes == own)])
        rail = world.subgroup(f"rail-{local}", list(range(local, world.size, int(sizes[0]))))
        return cls(world, words, nodes, racks_of, node, rail)

    @property
    def num_nodes(self) -> int:
        return int(self.node_of.max()) + 1

    @property
    def ranks_per_node(self) -> int:
        """Of nodes of equal size."""
        return self.world.size // self.num_nodes

    @property
    def near(self) -> range:
        """The ranks of this rank's node."""
        own = np.flatnonzero(self.node_of == self.node_of[self.world.rank])
        return range(int(own[0]), int(own[-1]) + 1)

    @property
    def has_rails(self) -> bool:
        """Whether the hierarchical forms are possible."""
        return self.rail is not None

    def hop_class(self) -> Int64:
        """Class of the hop from this rank to each rank [R]; 0 for itself too."""
        own = self.world.rank
        apart = (self.node_of != self.node_of[own]).astype(np.int64)
        return apart + (self.rack_of != self.rack_of[own])

    def by_link(self, group: Transport, counts: Int64) -> tuple[int, int]:
        """Of `counts` to each rank of a group of this mesh, how many go inside the node (not to itself) and between."""
        others = int(counts.sum()) - int(counts[group.rank])
        if group is self.node:
            return others, 0
        if group is self.rail:
            return 0, others
        between = int(counts[self.node_of != self.node_of[group.rank]].sum())
        return others - between, between

    def bytes_by_hop(self) -> list[int]:
        """Bytes that this rank has sent to others, by hop class, through all groups of the mesh."""
        total = self.world.bytes_to + self.words.bytes_to
        own = self.world.rank
        if self.node is not None and self.rail is not None:
            total[self.node_of == self.node_of[own]] += self.node.bytes_to
            total[own % self.ranks_per_node :: self.ranks_per_node] += self.rail.bytes_to
        total[own] = 0
        return [int(total[self.hop_class() == hop].sum()) for hop in range(len(HOPS))]
