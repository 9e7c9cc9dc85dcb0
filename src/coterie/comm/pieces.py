"""Pieces of a hierarchical dispatch: who sends how much to whom in each, from the counts that all ranks have.

A piece is some consecutive tokens of every rank: counts of each are gathered with the others, so that a rank which
passes a piece on knows what the next one will bring. Host integers only; `moe.hierarchical` moves the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.comm.buffers import Bytes
from coterie.comm.exchange import PIECES, Counts
from coterie.comm.mesh import Mesh
from coterie.comm.rows import FanOut, Part, fan_out, row_counts
from coterie.comm.transport import Int64


def parts_sent(parts: Sequence[Part]) -> int:
    """Rows that leave."""
    return sum(part.leaving for part in parts)


def parts_received(parts: Sequence[Part]) -> int:
    """Rows that come."""
    return sum(part.coming for part in parts)


class Tokens(NamedTuple):
    """A rank's tokens: packed rows [T, width], the nodes and ranks that need them [T, .], where parts begin [C + 1]."""

    packed: Bytes
    to_nodes: Any
    to_all: Any
    bounds: Int64


def part_bounds(tokens: int, parts: int) -> Int64:
    """Where each of so many parts of a rank's tokens begins, and the last ends [C + 1]."""
    return np.arange(parts + 1) * tokens // parts


def by_part(member: Any, bounds: Int64) -> Int64:
    """Rows to each destination of each part of the tokens [C, D]."""
    return np.stack([row_counts(member[start:end]) for start, end in itertools.pairwise(bounds)])


class PiecePlan:
    """Who sends how much to whom in which piece; `cuts`: the parts of the tokens that make each piece."""

    def __init__(self, mesh: Mesh, counts: Counts, pieces: int) -> None:
        cuts = np.array_split(np.arange(PIECES), pieces)
        self.mesh, self.counts, self.cuts = mesh, counts, cuts
        self.size, self.near = mesh.ranks_per_node, mesh.near
        rank, size = mesh.world.rank, self.size
        nodes = counts.by_part.reshape(mesh.num_nodes, size, PIECES, -1)  # rows of (node, place)
        far = np.delete(nodes, rank // size, axis=0)
        self.passed_to_me = [far[:, :, cut, rank].sum((0, 2)) for cut in cuts]
        passed = far[:, rank % size, :, self.near.start : self.near.stop]
        self.passed_on = int(passed.sum() + counts.rows[rank, self.near.start : self.near.stop].sum())
        ranks = np.delete(np.arange(mesh.world.size).reshape(-1, size), rank // size, axis=0).T.reshape(-1)
        by_piece = [np.repeat(ranks, counts.by_part[ranks][:, cut, rank].sum(1)) for cut in cuts]
        own = np.arange(self.near.start, self.near.stop)
        self.sources = np.concatenate([np.repeat(own, counts.rows[own, rank]), *by_piece])

    def rail(self, tokens: Tokens) -> list[Part]:
        """Each piece's rows between nodes."""
        rank, size = self.mesh.world.rank, self.size
        far = tokens.to_nodes.copy()
        far[:, rank // size] = False
        parts = []
        for cut in self.cuts:
            start, end = int(tokens.bounds[cut[0]]), int(tokens.bounds[cut[-1] + 1])
            plan = fan_out(far[start:end])
            received = self.counts.nodes[rank % size :: size, cut, rank // size].sum(1)
            received[rank // size] = 0
            parts.append(Part(FanOut(plan.row + start, plan.counts), received))
        return parts

    def own(self, tokens: Tokens) -> Part:
        """The rows of this rank's own tokens inside the node."""
        rank, near = self.mesh.world.rank, self.near
        plan = fan_out(tokens.to_all[:, near.start : near.stop])
        return Part(plan, self.counts.rows[near.start : near.stop, rank])
