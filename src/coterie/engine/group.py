"""Group: the control exchange of ranks that step together. Once before each step all tell all; so all decide alike.

What is exchanged is one row of integers a rank; a step with several ranks costs one such exchange. Alone there is
nothing to exchange. Not here: the exchanges inside a step (`moe.forms`), how ranks find each other (`engine.rank`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.comm.local import LocalTransport
from coterie.comm.transport import Int64, RankLost, Transport, TransportError
from coterie.engine.errors import Desynchronised
from coterie.engine.overlap_choice import OverlapChooser


class Entry(NamedTuple):
    """One rank before a step. `generation`: the newest it has heard of. `step_ns`: how long its last step took.
    `moved`: how far it is in moving experts (`rebalance`)."""

    generation: int
    has_work: bool
    num_tokens: int
    wake: int
    drains: bool
    step_ns: int
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """The entries of all ranks, [R, fields]."""

    rows: Int64

    def _column(self, name: str) -> Int64:
        return self.rows[:, Entry._fields.index(name)]

    @property
    def generation(self) -> int:
        """The newest generation that every rank has heard of."""
        return int(self._column("generation").min())

    @property
    def has_work(self) -> bool:
        return bool(self._column("has_work").any())

    @property
    def num_tokens(self) -> int:
        return int(self._column("num_tokens").sum())

    @property
    def tokens_by_rank(self) -> list[int]:
        return [int(count) for count in self._column("num_tokens")]

    @property
    def seconds_by_rank(self) -> list[float]:
        """Of the step before."""
        return [int(count) / 1e9 for count in self._column("step_ns")]

    @property
    def least_moved(self) -> int:
        """How far all ranks are in moving experts."""
        return int(self._column("moved").min())

    @property
    def wakes_agree(self) -> bool:
        """Whether every rank knows of the same messages."""
        wakes = self._column("wake")
        return int(wakes.min()) == int(wakes.max())

    @property
    def all_drain(self) -> bool:
        return bool(self._column("drains").all())


class Group:
    """One generation of the ranks; the group of one by default."""

    def __init__(
        self, transport: Transport | None = None, generation: int = 0, overlap: OverlapChooser | None = None
    ) -> None:
        self.transport: Transport = transport or LocalTransport()
        self.generation = generation
        self.step = 0
        self._overlap = overlap or OverlapChooser("off")

    def exchange(self, entry: Entry) -> Table:
        """Tell all ranks and hear of all. Raises Desynchronised if one is lost or is at another step."""
        self.step += 1
        own = np.array([self.step, *entry], np.int64)
        if self.transport.size == 1:
            return Table(own[None, 1:])
        try:
            rows: Int64 = self.transport.all_gather(own).result()
        except TransportError as error:
            missing = error.missing if isinstance(error, RankLost) else ()
            raise Desynchronised(str(error), own=False, missing=missing) from error
        if (rows[:, 0] != self.step).any():
            raise Desynchronised(f"ranks are at steps {rows[:, 0].tolist()}, this one at {self.step}", own=True)
        table = Table(rows[:, 1:])
        self._overlap.learn(table.seconds_by_rank)
        return table

    def micro_batches(self, table: Table) -> int:
        """How many the next step has, the same on all ranks."""
        return self._overlap.choose(table.tokens_by_rank)
