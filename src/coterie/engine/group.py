"""Group: the control exchange of ranks that step together. Once before each step all tell all; so all decide alike.

What is exchanged is one row of integers a rank; a step with several ranks costs one such exchange, and one more for the
batch where the ranks of a tensor-parallel group compute it together. Alone there is nothing to exchange. Not here: the
exchanges inside a step (`moe.forms`, `comm.tensor_group`), how ranks find each other (`engine.rank`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.comm.local import LocalTransport
from coterie.comm.transport import Int64, RankLost, Transport, TransportError
from coterie.engine.batch import from_words, num_words, to_words
from coterie.engine.errors import Desynchronised
from coterie.engine.overlap_choice import OverlapChooser
from coterie.kernels.batch import ForwardBatch


class Entry(NamedTuple):
    """One rank before a step. `generation`: the newest it has heard of. `step_ns`: how long its last step took.
    `moved`: how far it is in moving experts (`rebalance`).
    `words`: length of its batch as a vector, where others compute it too."""

    generation: int
    has_work: bool
    num_tokens: int
    wake: int
    drains: bool
    step_ns: int
    moved: int = 0
    words: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """The entries of all ranks, [R, fields]; `tensor` consecutive ranks compute the batches of the first of them."""

    rows: Int64
    tensor: int = 1

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
        return [int(count) for count in np.repeat(self._column("num_tokens")[:: self.tensor], self.tensor)]

    def words(self, rank: int) -> int:
        """Length of the vector that holds the batch of a rank's group."""
        return int(self._column("words")[rank // self.tensor * self.tensor])

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
    """One generation of the ranks; the group of one by default. `tensor`: this rank's tensor-parallel group."""

    def __init__(
        self,
        transport: Transport | None = None,
        generation: int = 0,
        overlap: OverlapChooser | None = None,
        tensor: Transport | None = None,
    ) -> None:
        self.transport: Transport = transport or LocalTransport()
        self.tensor = tensor
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
            raise _lost(error) from error
        if (rows[:, 0] != self.step).any():
            raise Desynchronised(f"ranks are at steps {rows[:, 0].tolist()}, this one at {self.step}", own=True)
        table = Table(rows[:, 1:], 1 if self.tensor is None else self.tensor.size)
        self._overlap.learn(table.seconds_by_rank)
        return table

    def num_words(self, batch: ForwardBatch) -> int:
        """What to enter as `Entry.words`: nothing where nobody else computes this rank's batch."""
        return 0 if self.tensor is None or not batch.num_tokens else num_words(batch)

    def share(self, batch: ForwardBatch, table: Table) -> ForwardBatch:
        """The batch that the first rank of this tensor-parallel group has scheduled. Raises Desynchronised."""
        words = table.words(self.transport.rank)
        if self.tensor is None or not words:
            return batch
        others, is_first = self.tensor.size - 1, self.tensor.rank == 0
        own = np.tile(to_words(batch), others) if is_first else np.zeros(0, np.int64)
        sent = [0, *[words if is_first else 0] * others]
        received = [0 if is_first else words, *[0] * others]
        try:
            arrived = self.tensor.all_to_all_v(own, sent, received).result()
        except TransportError as error:
            raise _lost(error) from error
        return batch if is_first else from_words(arrived)

    def micro_batches(self, table: Table) -> int:
        """How many the next step has, the same on all ranks."""
        return self._overlap.choose(table.tokens_by_rank)


def _lost(error: TransportError) -> Desynchronised:
    missing = error.missing if isinstance(error, RankLost) else ()
    return Desynchronised(str(error), own=False, missing=missing)
