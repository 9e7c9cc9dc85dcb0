"""Exchange: what all MoE layers of a rank share to reach the experts of other ranks: mesh, placement, form, buffers.

Also the counts that go ahead of every sized payload, with the check that all ranks are in the same layer, form and
placement: a payload on which two ranks disagree would end processes. Moving rows is `moe.forms`'s; weights that move
between ranks are not here, a finished move is `install`ed between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np

from coterie.comm import live
from coterie.comm.buffers import BufferPool
from coterie.comm.link_use import LinkUse
from coterie.comm.live import LiveState, Rates
from coterie.comm.mesh import Mesh
from coterie.comm.slots import Integers, SlotTable
from coterie.comm.transport import Handle, Int64, Transport, TransportError
from coterie.spec.placement import ExpertPlacement

FormName = Literal["flat", "flat-reduced", "hierarchical", "hierarchical-reduced"]
FORMS: tuple[FormName, ...] = get_args(FormName)
COUNTED, FIXED = len(FORMS), len(FORMS) + 1
"""What a header says beside the forms: counts of experts, or the one header of the form of fixed capacity."""

WORDS = 5
"""Of a header that must be equal on all ranks: form, layer, version of the placement, bytes of a row out and back."""

HEAD = WORDS + live.WORDS
"""With what a rank says of its own speed."""

PIECES = 4
"""In how many pieces a payload between nodes is cut at most."""

PIECE_BYTES = 256 << 10
"""Of a rank's payload to other nodes, what a piece has at least: below it the wire is not what is waited for."""


@dataclass(frozen=True, slots=True)
class FormPolicy:
    """`sized`: the form of batches of any size. `capacity`: rows that a rank may send to each other rank in the form of
    fixed capacity, which needs no counts beforehand; 0 does not use it. The reduced forms return sums per rank or node:
    fewer bytes, repeatable, equal to one rank only up to rounding. `piece_bytes`: in exact forms outputs for other
    nodes, and in the hierarchical one rows too, leave first and in pieces of at least so many bytes; 0: all whole."""

    sized: FormName = "flat"
    capacity: int = 0
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self) -> None:
        if self.sized not in FORMS:
            raise TransportError(f"the form of an exchange is one of {', '.join(FORMS)}, not {self.sized!r}")
        if self.capacity < 0:
            raise TransportError(f"the fixed capacity must be at least 0 rows, not {self.capacity}")

    @property
    def exact(self) -> bool:
        """Whether every token gets the bits that one rank gives it."""
        return not self.sized.endswith("reduced")


class Counts(NamedTuple):
    """What every rank sends, gathered, of each of C parts of its tokens: `rows` [R, C, R] to each rank, `nodes`
    [R, C, nodes]; `pairs` [R, R] of all tokens."""

    by_part: Int64
    pairs: Int64
    nodes: Int64

    @property
    def rows(self) -> Int64:
        """Rows to each rank [R, R]."""
        return self.by_part.sum(1)

    def far_pairs(self, node_of: Int64) -> int:
        """The most pairs that a rank sends to other nodes, or whose outputs it gets back from there."""
        return int((self.pairs * (node_of[:, None] != node_of)).sum(1).max())

    def from_nodes(self, rank: int, per_node: int) -> Int64:
        """Rows that reach `rank` from each node in the hierarchical forms, to stay or to be passed on [nodes]."""
        return self.nodes[rank % per_node :: per_node, :, rank // per_node].sum(1)

    def crossing(self, node_of: Int64) -> int:
        """The most rows that a rank sends to other nodes in the hierarchical forms."""
        nodes = self.nodes.sum(1)
        own = nodes[np.arange(len(nodes)), node_of]
        return int((nodes.sum(1) - own).max())

    def forwarded(self, rank: int, per_node: int) -> Int64:
        """The same in the hierarchical forms: by forwarder, whose rows are by source node."""
        by_place = np.arange(len(self.rows)).reshape(-1, per_node).T.reshape(-1)
        return np.repeat(by_place, self.rows[by_place, rank])

    def to_places(self, rank: int, per_node: int) -> Int64:
        """Rows that reach `rank` through each rank of its node [m]."""
        return self.rows[:, rank].reshape(-1, per_node).sum(0)


class FormChooser(Protocol):
    """Chooses the form anew while serving, from what all ranks have gathered, and so alike on all (`form_choice`)."""

    def entered(self, form: FormName, pairs: Int64) -> None:
        """An exchange begins in a form; `pairs` [R, R] travel between the ranks."""

    def heard(self, nanoseconds: int) -> None:
        """A header says how long the payloads since the last one took on the slowest rank."""

    def conclude(self, rates: Rates, policy: FormPolicy) -> FormPolicy:
        """The policy after `policy`, once a window; `rates`: what the links carry now."""


class Exchange:
    """One rank's part. Not thread-safe: one engine thread; `install` between steps only."""

    def __init__(
        self,
        mesh: Mesh,
        placement: ExpertPlacement,
        policy: FormPolicy | None = None,
        chooser: FormChooser | None = None,
    ) -> None:
        policy = policy or FormPolicy()
        if placement.num_ranks != mesh.world.size:
            raise TransportError(f"a placement for {placement.num_ranks} ranks, and there are {mesh.world.size}")
        if policy.sized.startswith("hierarchical") and not mesh.has_rails:
            raise TransportError(
                f"the {policy.sized} form needs at least two nodes of equal size; there are "
                f"{np.bincount(mesh.node_of).tolist()} ranks on {mesh.num_nodes} nodes; use flat"
            )
        self.mesh, self.policy, self.pool = mesh, policy, BufferPool()
        self.live, self.links, self.chooser = LiveState(mesh.world.size), LinkUse(), chooser
        self._carried_until = 0
        self.version, self.adaptations = -1, 0
        self.last_counts = np.zeros((placement.num_layers, placement.num_experts), np.int64)
        self.overflows = 0
        if chooser is not None:
            for group in filter(None, (mesh.world, mesh.node, mesh.rail)):
                group.stamp_ends = True  # an exchange that ran under compute is not a slow one
        self.install(placement)

    @classmethod
    def linear(cls, world: Transport, num_layers: int, num_experts: int) -> Exchange:
        """Experts in order over ranks of one node."""
        placement = ExpertPlacement.linear(num_layers, num_experts, world.size)
        return cls(Mesh.of(world, placement.node_of_rank), placement)

    def install(self, placement: ExpertPlacement) -> None:
        """Use another table from the next step on; every rank does so at the same step boundary."""
        self.placement = placement
        self._make_tables()
        self.version += 1

    def _make_tables(self) -> None:
        layers = range(self.placement.num_layers)
        self.tables = [SlotTable(self.placement, layer, self.live.speeds) for layer in layers]

    def install_layer(self, layer: int, row: Integers) -> None:
        """The same for the slots [S] of one layer."""
        table = self.placement.slot_to_expert.copy()
        table[layer] = row
        self.placement = self.placement.with_layers(table)
        self.tables[layer] = SlotTable(self.placement, layer, self.live.speeds)
        self.version += 1

    @property
    def own_slots(self) -> range:
        """The slots of this rank."""
        slots = self.placement.slots_of_rank(self.mesh.world.rank)
        return range(slots.start, slots.stop)

    def header(self, kind: int, layer: int, width: int, back: int) -> list[int]:
        """First words of what a rank sends ahead, the same on all ranks; bytes of a row on both ways."""
        return [kind, layer, self.version, width, back]

    def check(self, gathered: Int64, expected: list[int]) -> None:
        """Refuse headers [R, >= 4] that differ: the ranks are not in the same exchange."""
        if gathered[:, :WORDS].tobytes() != np.array(expected, np.int64).tobytes() * len(gathered):
            wrong = np.flatnonzero((gathered[:, :WORDS] != expected).any(1))
            names = [*FORMS, "counts of experts", "fixed"]
            other = gathered[wrong[0], :WORDS].tolist()

            def say(words: list[int]) -> str:
                kind = names[words[0]] if 0 <= words[0] < len(names) else str(words[0])
                return f"{kind}, layer {words[1]}, placement {words[2]}, rows of {words[3]} bytes, {words[4]} back"

            raise TransportError(
                f"rank {wrong[0]} is in another exchange: {say(other)}; rank {self.mesh.world.rank}: {say(expected)}"
            )

    def count_experts(self, expert_ids: Integers) -> Int64:
        """Rows per expert [E] of this rank."""
        return np.bincount(expert_ids.reshape(-1), minlength=self.placement.num_experts)

    def message(self, header: list[int], *parts: Int64) -> Int64:
        """One rank's vector: header, its own speed, and what the exchange needs to know."""
        return np.concatenate([np.array(header, np.int64), self.live.words(), *parts])

    def hear(self, gathered: Int64, header: list[int]) -> Int64:
        """All ranks' vectors [R, n], checked -> their parts. Where a window ends, splits and form follow the speeds."""
        self.check(gathered, header)
        ended = self.live.heard(gathered[:, WORDS:HEAD])
        if self.chooser is not None:
            self.chooser.heard(self.live.carrying)
        if ended:
            changed, rates = self.live.conclude()
            if changed and any(table.has_copies for table in self.tables):
                self._make_tables()
            policy = self.policy if self.chooser is None else self.chooser.conclude(rates, self.policy)
            self.adaptations += policy != self.policy
            self.policy = policy
        return gathered[:, HEAD:]

    def carried(self, group: Transport, counts: Int64, width: int, handle: Handle) -> None:
        """Note how long a payload took: `counts` rows of `width` bytes to each rank of a group of the mesh. Where there
        is no choice nobody asks."""
        if self.chooser is None:
            return
        inside, between = self.mesh.by_link(group, counts)
        together = min(max(self._carried_until - handle.begun_ns, 0), handle.ended_ns - handle.begun_ns)
        self._carried_until = max(self._carried_until, handle.ended_ns)
        self.live.carried(inside * width, between * width, handle.ended_ns - handle.begun_ns)
        self.live.together(together)
        self.links.carried((inside * width, between * width), handle.begun_ns, handle.ended_ns)

    def read_experts(self, gathered: Int64, header: list[int], layer: int) -> Int64:
        """All ranks' rows per expert [R, E], checked and kept."""
        experts = self.hear(gathered, header)
        self.note_experts(layer, experts)
        return experts

    def read_counts(self, gathered: Int64, header: list[int], layer: int, parts: int = 1) -> Counts:
        """All ranks' rows and pairs to each rank and rows to each node (0 in flat forms), of `parts` parts of their
        tokens. Rows per expert may follow (where there are copies, unless gathered before); they are kept for the
        layer's next batch."""
        size, nodes = self.mesh.world.size, self.mesh.num_nodes
        lengths = np.cumsum([parts * size, size, parts * nodes])
        rows, pairs, between, experts = np.split(self.hear(gathered, header), lengths, axis=1)
        self.note_experts(layer, experts)
        if self.chooser is not None:
            self.chooser.entered(FORMS[header[0]], pairs)
        return Counts(rows.reshape(size, parts, size), pairs, between.reshape(size, parts, nodes))

    def pieces(self, most: int) -> int:
        """In how many pieces all ranks cut a payload of which a rank sends at most so many bytes to other nodes."""
        size = self.policy.piece_bytes
        return min(max(most // size, 1), PIECES) if size else 1

    def note_experts(self, layer: int, experts: Int64) -> None:
        """Keep gathered rows per expert [R, E] (or of no columns) for the layer's next batch."""
        if experts.shape[1]:
            self.last_counts[layer] = experts.sum(0)
