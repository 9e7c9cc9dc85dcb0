"""Step times for the simulation: the planner's cost of a step, tabulated in the two parts that `simulate` asks for.

A step's cost is a sum: attention (linear in cached tokens read and in pairs), products on a rank's own rows, the head,
the exchange, which waits for the rank that sends most (and has another form beside prompts), and what depends on the
rows of all: routed experts and constants. All but the first are tables over rows, read by straight lines between
points. With multi-token prediction a simulated step is one token: the streams' part of a verified step over the tokens
it gains. Not here: the cost itself (`cost`, `ops`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from coterie.planner.cost import StepCost, mixed_step, prior
from coterie.planner.known import PRIOR, Known
from coterie.planner.known import STREAMS as BOOKKEEPING
from coterie.planner.layout import Layout
from coterie.planner.ops import Point, requests_per_group
from coterie.planner.simulate import StepTime
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec, MoESpec

STREAMS, PROMPTS, HEAD = "attention of streams", "attention of prompts", "head"
EXCHANGE = ("all-to-all", "all-to-all, not hidden")
SHARED = ("routed experts", "layer constant", "step constant")
"""Lines of a step's table (`cost`) by what they depend on; all others are products on a rank's own rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on devices, what is known of its times, and what a step's point has beside its batch. `gamma(tokens)`:
    imbalance of a step with so many tokens over all devices, and the share of experts that have any (None: even)."""

    model: ModelSpec
    hardware: HardwareSpec
    layout: Layout
    known: Known = PRIOR
    draft: int = 0
    accept: float = 0.85
    overlap: bool = False
    gamma: Callable[[float], tuple[float, float | None]] | None = None

    def point(self, batch: float, context: float, *, prompt: bool = False) -> Point:
        """A point of the whole deployment; prompts are not drafted for."""
        rows = batch * (context if prompt else 1 + self.draft)
        gamma, share = (1.0, None) if self.gamma is None else self.gamma(rows)
        return Point(batch=batch, context=context, gamma=gamma, hit=self._hit(share), overlap=self.overlap,
                     draft=0 if prompt else self.draft, accept=self.accept)  # fmt: skip

    def _hit(self, share: float | None) -> float | None:
        """Experts of a rank with a token, from the share of all."""
        kinds = (layer.ffn for layer, _ in self.model.layer_kinds)
        experts = max((ffn.num_experts for ffn in kinds if isinstance(ffn, MoESpec)), default=0)
        return None if share is None or not experts else max(share * experts / self.layout.ep, 1e-3)

    def decode(self, batch: float, context: float) -> StepCost:
        """A step of `batch` streams over all devices."""
        return self._cost(self.point(batch, context), None)

    def prefill(self, batch: float, tokens: float, past: float = 0.0) -> StepCost:
        """A step of `batch` prompts over all devices with so many new tokens each."""
        return self._cost(None, replace(self.point(batch, tokens, prompt=True), past=past))

    def mixed(self, streams: tuple[float, float], prompts: tuple[float, float, float]) -> StepCost:
        """Both at once: (streams, context) and (prompts, new tokens each, cached tokens each) over all devices."""
        batch, tokens, past = prompts
        return self._cost(self.point(*streams), replace(self.point(batch, tokens, prompt=True), past=past))

    def _cost(self, decode: Point | None, prefill: Point | None) -> StepCost:
        cost = mixed_step(self.model, self.hardware, self.layout, (decode, prefill), self.known.efficiency)
        if decode is None or not self.known.rows:
            return cost
        return replace(cost, ops=(*cost.ops, self.known.streams(requests_per_group(decode, self.layout))))


class Line:
    """A function of rows from 0 up, by straight lines between its values at given rows; beyond them the last line."""

    def __init__(self, rows: list[float], values: list[float]) -> None:
        self._rows, self._values = rows, values
        self._slopes = [
            (values[i + 1] - values[i]) / (rows[i + 1] - rows[i]) for i in range(len(rows) - 1)
        ]  # fmt: skip

    def __call__(self, rows: float) -> float:
        place = min(max(bisect_right(self._rows, rows) - 1, 0), len(self._slopes) - 1)
        return self._values[place] + (rows - self._rows[place]) * self._slopes[place]


def step_time(setting: Setting, context: float, most: int) -> StepTime:
    """Tabulate steps of up to `most` rows a rank. `context`: typical cached tokens of a stream, which what can be
    hidden under computing depends on; attention itself is exact in whatever is read."""
    layout, wide = setting.layout, 1 + setting.draft
    gain = setting.point(1, 1).tokens_per_step
    rows = _grid(most)
    own, head, alone, beside, shared = ([0.0] for _ in range(5))
    plain = replace(setting, draft=0)
    for count in rows[1:]:
        cost, mixed = plain.decode(count * layout.dp, context), plain.prefill(2 * layout.dp, count / 2)
        own.append(_sum(cost, lambda name: name not in (STREAMS, HEAD, BOOKKEEPING, *EXCHANGE, *SHARED)))
        head.append(_sum(cost, lambda name: name in (HEAD, BOOKKEEPING)))
        alone.append(_sum(cost, lambda name: name in EXCHANGE))
        beside.append(_sum(mixed, lambda name: name in EXCHANGE))
        shared.append(_sum(cost, lambda name: name in SHARED))
    own[0], alone[0], beside[0] = own[1], alone[1], beside[1]
    shared[0] = (setting.known.efficiency or prior(setting.hardware)).step_seconds
    drafted, read, pair = _drafted(setting, context), _read(setting, context), _pair(plain, context)
    own_at, head_at, shared_at = Line(rows, own), Line(rows, head), Line(rows, shared)
    alone_at, beside_at = Line(rows, alone), Line(rows, beside)
    less = 1 - 1 / gain

    def local(decode: int, cached: int, prompt: int, pairs: float) -> float:
        mine = decode * wide
        seconds = own_at(mine + prompt) + head_at(mine + (prompt > 0)) + pairs * pair
        seconds += beside_at(mine + prompt) if prompt else alone_at(mine)
        if not decode:
            return seconds
        saved = less * (own_at(mine) + head_at(mine) + alone_at(mine)) if less else 0.0
        return seconds + cached * read / gain - saved

    def common(decode: float, prompt: float) -> float:
        mine = decode * wide
        seconds = shared_at(mine + prompt)
        return seconds if not less or not decode else seconds - less * shared_at(mine) + drafted / gain

    return StepTime(local, common)


def _grid(most: int) -> list[float]:
    """0, then whole numbers of rows, denser at the small end, to at least `most`."""
    rows = [0, 1, 2, 3, 4]
    while rows[-1] < max(most, 8):
        rows.append(max(rows[-1] + 1, round(rows[-1] * 1.35)))
    return [float(count) for count in rows]


def _sum(cost: StepCost, wanted: Callable[[str], bool]) -> float:
    return sum(op.seconds for op in cost.ops if wanted(op.name))


def _read(setting: Setting, context: float) -> float:
    """Seconds per cached token that a stream of a rank reads."""
    cost = setting.decode(2 * setting.layout.dp, context)
    return _sum(cost, lambda name: name == STREAMS) / (2 * context)


def _pair(setting: Setting, context: float) -> float:
    """Seconds per (token, earlier token) pair of a rank's prompts."""
    length = max(round(context), 512)
    cost = setting.prefill(setting.layout.dp, length)
    return _sum(cost, lambda name: name == PROMPTS) / (0.5 * length * (length + 1))


def _drafted(setting: Setting, context: float) -> float:
    """Seconds of drafting in a step of one stream a rank, nearly the same at any batch that memory bounds."""
    if not setting.draft:
        return 0.0
    return _sum(setting.decode(setting.layout.dp, context), lambda name: name.startswith("draft"))
