"""ExpertShard: the experts that one rank holds, and what is left of a layout or a load plan for such a rank.

A rank's bank of a MoE layer has one matrix for each of its slots, in the order of the slots. Everything else is on
every rank, or its columns on those of a tensor-parallel group (`columns`); MTP blocks are on none. Formats are decided
for the whole model before this, so that a rank's bytes are those that a full load gives the same expert.
Not here: who holds what (`spec.placement`), reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.model.columns import ColumnCuts
from coterie.model.load_plan import LoadPlan, PlannedTensor
from coterie.model.names import Part, TensorEntry, WeightLayout
from coterie.model.safetensors_io import Piece
from coterie.spec.model import ModelSpec
from coterie.spec.placement import ExpertPlacement
from coterie.spec.tensor_split import UNDIVIDED, TensorSplit

MTP_PREFIX = "mtp."
"""Of the keys of MTP blocks."""


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """`experts`: by unit (`layers.3.ffn`) the expert of each local slot; -1 leaves a slot as it is.

    `held`: a rank's banks, into which only the experts named here are to be loaded; None loads the whole rank.
    `columns`: what the rank has of everything else that is cut; `most`: what the first rank of its group has, which is
    not less.
    """

    experts: Mapping[str, tuple[int, ...]]
    held: Mapping[str, Any] | None = None
    columns: ColumnCuts = field(default_factory=ColumnCuts)
    most: ColumnCuts = field(default_factory=ColumnCuts)

    @classmethod
    def of(
        cls, placement: ExpertPlacement, spec: ModelSpec, rank: int, split: TensorSplit | None = None
    ) -> ExpertShard:
        """What a rank holds under a placement, in its place in a tensor-parallel group."""
        rows = placement.slot_to_expert[:, placement.slots_of_rank(rank)].tolist()
        layers = [index for index, _ in spec.moe_layers()]
        experts = {f"layers.{index}.ffn": tuple(row) for index, row in zip(layers, rows, strict=True)}
        return cls(experts).cut(spec, split or UNDIVIDED)

    def cut(self, spec: ModelSpec, split: TensorSplit) -> ExpertShard:
        """The same with a rank's columns of a tensor-parallel group."""
        return replace(self, columns=ColumnCuts.of(spec, split), most=ColumnCuts.of(spec, replace(split, rank=0)))

    def since(self, before: ExpertShard, held: Mapping[str, Any]) -> ExpertShard:
        """What must be loaded into `held`, the banks of a rank that had `before`, to have this."""

        def change(unit: str, row: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(new if new != old else -1 for new, old in zip(row, before.experts[unit], strict=True))

        return replace(self, experts={unit: change(unit, row) for unit, row in self.experts.items()}, held=held)

    @property
    def num_experts(self) -> int:
        """Experts to load, of all layers."""
        return sum(expert >= 0 for row in self.experts.values() for expert in row)

    def layout(self, layout: WeightLayout) -> WeightLayout:
        """The layout of this rank: smaller banks, and only tensors of which a part is left."""
        banks = {
            key: replace(size, count=len(self.experts[size.unit])) if size.unit in self.experts else size
            for key, size in layout.banks.items()
            if not key.startswith(MTP_PREFIX)
        }
        vectors = {key: size for key, size in layout.vectors.items() if not key.startswith(MTP_PREFIX)}
        entries = ((name, self._entry(entry, layout)) for name, entry in layout.tensors.items())
        own = WeightLayout(banks, vectors, {name: entry for name, entry in entries if entry.parts})
        return self.columns.layout(own)

    def needed(self, layout: WeightLayout) -> WeightLayout:
        """What counts as this rank's memory: the same on all ranks of a group, so that their caches are of one size."""
        return replace(self, columns=self.most).layout(layout)

    def plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of this rank."""
        tensors: list[PlannedTensor] = []
        for item in plan.tensors:
            entry = self.entry(item.entry, plan.layout)
            if entry.parts or (not item.entry.parts and self.held is None):
                tensors.append(replace(item, entry=entry))
        comparisons = plan.comparisons if self.held is None else ()
        layout = self.layout(plan.layout)
        return replace(plan, layout=layout, tensors=tuple(tensors), comparisons=comparisons, mtp_present=False)

    def entry(self, entry: TensorEntry, layout: WeightLayout) -> TensorEntry:
        """A tensor's parts that are wanted here, at the place they have here."""
        return self.columns.entry(self._entry(entry, layout), layout)

    def _entry(self, entry: TensorEntry, layout: WeightLayout) -> TensorEntry:
        """The same without the columns."""
        return TensorEntry(entry.shape, tuple(new for part in entry.parts for new in self._parts(part, layout)))

    def _parts(self, part: Part, layout: WeightLayout) -> Iterable[Part]:
        size = layout.banks.get(part.bank)
        if part.bank.startswith(MTP_PREFIX):
            return
        if size is None or size.unit not in self.experts:
            if self.held is None:
                yield part
            return
        for slot, expert in enumerate(self.experts[size.unit]):
            if expert == part.index:
                yield replace(part, index=slot)


def takes(entry: TensorEntry, piece: Piece) -> bool:
    """Whether a piece must be read: a part wants rows of it, or it ends its tensor."""
    if piece.is_last or not entry.parts:
        return True
    end = piece.row + piece.rows
    return any(part.rows is None or (part.rows[0] < end and piece.row < part.rows[1]) for part in entry.parts)
