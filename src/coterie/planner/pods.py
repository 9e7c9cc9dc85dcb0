"""One large expert-parallel group against pods of fewer devices each: which decodes faster, by skew and context.

A large group reads fewer expert weights on each device; pods have a less busy busiest rank, and their links may be
faster. Both have the same requests on each device, so the ratio of step times is the ratio of throughputs. Times are
those of `cost.decode_step`; with `IDEAL` they are the roofline of arXiv 2507.15465 (Eq. 10 to 13: bytes over bandwidth
or products over peak, exchanges in full, no overlap). Memory is not compared: a large group has room for more requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from coterie.planner.cost import Efficiency, decode_step
from coterie.planner.imbalance import gamma
from coterie.planner.layout import CacheName, Layout, WeightName
from coterie.planner.network import PAPER, moe_of
from coterie.planner.ops import Point
from coterie.planner.skew import Skew
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec
from coterie.spec.placement import smallest_slots

IDEAL = Efficiency(eta_m=1.0, eta_p=1.0, eta_a=1.0, layer_seconds=0.0, step_seconds=0.0, link=PAPER)
"""The reference paper's: every rate is reached, nothing else takes time but its 0.8 us of an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """`group` devices as one, or in pods of `pod`; `requests` on each device with `context` tokens each.

    group_gbps: links of a device in the large group, GB/s a direction (0: as in a pod). copies: expert slots on each
    rank beyond the fewest; with `balanced` placements are balanced, else random. tokens: of the batch that imbalance is
    drawn for (to the nearest power of two), 0 for those of one step.
    """

    group: int = 256
    pod: int = 32
    requests: float = 81.0
    context: float = 2048.0
    group_gbps: float = 0.0
    balanced: bool = False
    copies: int = 0
    tokens: float = 0.0
    weights: WeightName = "bf16"
    kv: CacheName = "bf16"

    def __post_init__(self) -> None:
        if not 1 <= self.pod <= self.group or self.group % self.pod:
            raise SpecError(f"{self.group} devices cannot be divided into pods of {self.pod}")
        if self.copies and not self.balanced:
            raise SpecError("copies of experts are placed by balancing: ask for balanced as well")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: seconds of a decode step, and the imbalance that it has."""

    seconds: float
    gamma: float


def side(model: ModelSpec, hw: HardwareSpec, contest: Contest, skew: Skew, ranks: int, eff: Efficiency) -> Side:
    """A decode step of a group of `ranks` devices of `hw` (its scale-up links span the group)."""
    experts = moe_of(model).num_experts
    redundant = smallest_slots(experts, ranks) - experts + contest.copies * ranks
    batch = contest.requests * ranks
    near = 1 << round(math.log2(max(contest.tokens or batch, 1)))
    found = gamma(skew, model, near, ranks, "balanced" if contest.balanced else "random", redundant).rank
    layout = Layout(
        devices=ranks, tp=1, dp=ranks, ep=ranks, redundant=redundant, weights=contest.weights, kv=contest.kv
    )
    point = Point(batch=batch, context=contest.context, gamma=max(found, 1.0))
    return Side(decode_step(model, replace(hw, domain=ranks), layout, point, eff).seconds, found)


def contest_sides(
    model: ModelSpec, hw: HardwareSpec, contest: Contest, skew: Skew, eff: Efficiency = IDEAL
) -> tuple[Side, Side]:
    """(large group, pod)."""
    wide = replace(hw, scaleup_gbps=contest.group_gbps) if contest.group_gbps else hw
    return (
        side(model, wide, contest, skew, contest.group, eff),
        side(model, hw, contest, skew, contest.pod, eff),
    )


def crossing(skews: list[float], ratios: list[float], level: float) -> float | None:
    """The first skew at which the ratio reaches `level`, between the given ones linearly; None if it never does."""
    if ratios and ratios[0] >= level:
        return skews[0]
    for left, right, below, above in zip(skews, skews[1:], ratios, ratios[1:], strict=False):
        if below < level <= above:
            return left + (right - left) * (level - below) / (above - below)
    return None
