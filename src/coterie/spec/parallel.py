"""ParallelConfig: over how many ranks and nodes a model is spread, checked against each other and against the model.

`dp` groups of ranks answer different requests; the `tp` ranks of a group share its requests and have heads and columns
of everything that is no expert. Experts lie on all ranks together, so `ep` = `dp` x `tp`; what is left out follows from
what is given. A dense model takes one group. Not here: which expert lies where (`placement`), processes, the forms of
the exchange (`comm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.spec.errors import SpecError
from coterie.spec.model import ModelSpec
from coterie.spec.placement import ExpertPlacement, check_slots, check_topology, smallest_slots
from coterie.spec.tensor_split import TensorSplit, check_tensor_split

MAX_RANKS = 1024

ExchangeDtype = Literal["float32", "bfloat16"]
"""In which a routed expert's output for a token travels back and is summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of one engine. `nodes` hold consecutive ranks, equally many each.

    redundant_experts: slots beyond one for each expert, in each layer; None takes the smallest number with which the
    slots divide over the ranks. Copies balance load, and let experts outlive a lost rank. restart_ranks: start a lost
    rank's process again. overlap: steps in two micro-batches, each computing while the other's rows travel; auto
    measures. rebalance_steps: after so many steps experts may move to ranks with less load, at most rebalance_moves in
    each layer, sent with rebalance_rate MB/s by each rank; 0 never. stall_seconds: a rank that lives, and for so long
    neither gets on with its work nor waits for another, is taken for lost. Raises SpecError with the valid values for a
    layout that cannot be.
    """

    tp: int = 1
    dp: int | None = None
    ep: int | None = None
    nodes: int = 1
    redundant_experts: int | None = None
    restart_ranks: bool = True
    overlap: Literal["auto", "on", "off"] = "auto"
    rebalance_steps: int = 0
    rebalance_moves: int = 8
    rebalance_rate: float = 32.0
    stall_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "nodes"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_RANKS:
                raise SpecError(f"{name} must be from 1 to {MAX_RANKS}, not {value}")
        if self.redundant_experts is not None and self.redundant_experts < 0:
            raise SpecError(f"redundant experts must be at least 0, not {self.redundant_experts}")
        if self.rebalance_steps < 0 or self.rebalance_moves < 1 or not 0 < self.rebalance_rate < 1e6:
            raise SpecError(
                "rebalance_steps must be at least 0, rebalance_moves at least 1 and rebalance_rate above 0 MB/s, not "
                f"{self.rebalance_steps}, {self.rebalance_moves} and {self.rebalance_rate:g}"
            )
        if not 1 <= self.stall_seconds <= 1e5:
            raise SpecError(f"stall_seconds must be from 1 to 100000, not {self.stall_seconds:g}")
        if self.dp is not None and self.ep is not None and self.ep != self.dp * self.tp:
            raise SpecError(
                f"ep {self.ep} does not go with dp {self.dp} and tp {self.tp}: experts are spread over all dp x tp = "
                f"{self.dp * self.tp} ranks; give ep {self.dp * self.tp}, dp {self.ep // self.tp}, or only one of them"
            )
        if self.num_ranks % self.tp:
            raise SpecError(f"ep {self.ep} does not divide into groups of tp {self.tp}; give a multiple of {self.tp}")
        check_topology(self.num_ranks, self.nodes)
        if self.is_single:
            self._check_single()
        each = self.num_ranks // self.nodes
        if each % self.tp:
            raise SpecError(
                f"the {self.tp} ranks of a tp group must lie on one node, and {self.num_ranks} ranks on {self.nodes} "
                f"nodes are {each} a node; give fewer nodes, or a multiple of {self.tp * self.nodes} ranks"
            )

    def _check_single(self) -> None:
        """One rank has nobody to exchange with; what would be ignored is refused."""
        asked = {"redundant_experts": self.redundant_experts, "rebalance_steps": self.rebalance_steps}
        vain = [f"{name} {value}" for name, value in asked.items() if value]
        vain += ["overlap on"] if self.overlap == "on" else []
        if vain:
            raise SpecError(f"{' and '.join(vain)} only several ranks can have: ask for some with ep, or leave it out")

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.ep or (self.dp or 1) * self.tp

    def split(self, rank: int) -> TensorSplit:
        """A rank's place in its tensor-parallel group: `tp` consecutive ranks."""
        return TensorSplit(rank % self.tp, self.tp)

    @property
    def is_single(self) -> bool:
        """Whether one rank does everything."""
        return self.num_ranks == 1

    def placement(self, spec: ModelSpec) -> ExpertPlacement:
        """Where the experts of a model lie at first. Raises SpecError if they cannot lie on these ranks.

        A dense model has none, and can have the ranks of one tensor-parallel group.
        """
        counts = sorted({moe.num_experts for _, moe in spec.moe_layers()})
        check_tensor_split(spec, self.tp)
        if not counts:
            self._check_dense()
            return ExpertPlacement.without_experts(self.num_ranks, self.nodes)
        if len(counts) > 1:
            what = f"layers of {' and '.join(map(str, counts))} experts"
            raise SpecError(f"{self.num_ranks} ranks share the experts of a model, and this one has {what}; use ep 1")
        num_experts, redundant = counts[0], self.redundant_experts
        slots = smallest_slots(num_experts, self.num_ranks) if redundant is None else num_experts + redundant
        check_slots(slots, num_experts, self.num_ranks)
        layers = sum(1 for _ in spec.moe_layers())
        return ExpertPlacement.linear(layers, num_experts, self.num_ranks, self.nodes, slots)

    def _check_dense(self) -> None:
        if self.num_ranks != self.tp:
            raise SpecError(
                f"{self.num_ranks // self.tp} groups of ranks share the experts of a model, and this one has no "
                f"experts; its ranks can share heads and columns: use tp alone"
            )
        if self.redundant_experts or self.rebalance_steps:
            raise SpecError(
                "this model has no experts to copy or move: leave out redundant_experts and rebalance_steps"
            )


ONE_RANK = ParallelConfig()
"""No ranks beside this one."""
