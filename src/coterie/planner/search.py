"""Which layout to deploy: enumerate, prune by memory, time each at many batches, the Pareto front, a recommendation.

A deployment of n devices is a number of equal instances that decode, each laid out as a `Layout`, and beside them, if
prompts are computed apart, instances that do only that. Serving is the closed form: in the time a request decodes,
every other one of its rank computes its prompt once; a prompt waits for those before it as in an M/D/1 queue. Not here:
reasons, changes and launch commands (`advice`), exact queueing (`simulate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from coterie.planner.cost import StepCost
from coterie.planner.imbalance import Placement, gamma
from coterie.planner.known import PRIOR, Known
from coterie.planner.layout import Layout, divisors, layouts
from coterie.planner.memory import Load, budget
from coterie.planner.own import can_deploy, check_formats
from coterie.planner.skew import Skew
from coterie.planner.steptime import Setting
from coterie.planner.workload import Slo
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

PREFILL_LOAD = 0.85
"""Load of a pool of prefill instances: beyond, waiting grows without bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is asked. `like` gives formats, extras and the number of devices; `known` efficiencies and intervals.
    `every`: layouts that are never best as well (see `sensible`). `fixed`: what every instance that decodes must have,
    as ("tp", 8). `chunk`: prompt tokens of a step. Raises SpecError for sizes that cannot be."""

    model: ModelSpec
    hardware: HardwareSpec
    like: Layout
    slo: Slo
    isl: int = 4096
    osl: int = 1024
    hit: float = 0.0
    skew: Skew | None = None
    placement: Placement = "random"
    known: Known = PRIOR
    draft: int = 0
    accept: float = 0.85
    overlap: bool = False
    chunk: int = 8192
    utilisation: float = 0.9
    page: int = 64
    price_hour: float = 0.0
    apart: bool = True
    every: bool = False
    fixed: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.hit < 1:
            raise SpecError(f"the share of prompts found in the prefix cache must be from 0 to below 1, not {self.hit}")
        if not 0 <= self.price_hour < 1e6:
            raise SpecError(f"the price of a device-hour must be from 0 to 1e6, not {self.price_hour}")
        self.load(None)

    def load(self, batch: int | None) -> Load:
        """The memory's view of it."""
        return Load(batch=batch, isl=self.isl, osl=self.osl, chunk=self.chunk, utilisation=self.utilisation,
                    page=self.page)  # fmt: skip

    def setting(self, layout: Layout) -> Setting:
        """A layout's step times."""
        return Setting(model=self.model, hardware=self.hardware, layout=layout, known=self.known,
                       draft=self.draft, accept=self.accept, overlap=self.overlap and layout.dp > 1 and layout.ep > 1,
                       gamma=self._gamma(layout))  # fmt: skip

    def _gamma(self, layout: Layout) -> Callable[[float], tuple[float, float | None]] | None:
        if self.skew is None or layout.ep == 1 or not any(self.model.moe_layers()):
            return None
        return Busy(self, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to serve. `batch`: requests that decode in one of `instances`, each laid out as `layout`; prompts are
    computed there too, or by `prefill_instances` laid out as `prefill`. Seconds; `step` is the decode step. `rate`:
    requests a second of all devices. `prompt_share`: of an instance's time that prompts take,
    `chunk` tokens of one a step."""

    layout: Layout
    instances: int
    prefill: Layout | None
    prefill_instances: int
    batch: int
    b_cap: int
    tpot: float
    ttft: float
    step: StepCost
    rate: float
    osl: int
    prompt_share: float
    chunk: int

    @property
    def devices(self) -> int:
        apart = self.prefill.devices * self.prefill_instances if self.prefill is not None else 0
        return self.layout.devices * self.instances + apart

    @property
    def per_device(self) -> float:
        """Output tokens a second of one device, both pools counted."""
        return self.rate * self.osl / self.devices

    @property
    def per_user(self) -> float:
        """Output tokens a second that one user sees."""
        return 1 / self.tpot


@dataclass(frozen=True, slots=True)
class Found:
    """All candidates, those on the Pareto front (more tokens a second per user or per device than any other), and the
    best within the SLO: `safe` by the 90th percentile of TPOT and TTFT, `bold` by the median; None where none is."""

    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    safe: Candidate | None
    bold: Candidate | None


class Busy:
    """Imbalance of a layout by tokens of a step: (busiest rank over the mean, share of experts hit), measured at powers
    of four of the tokens, between them by straight lines."""

    def __init__(self, search: Search, layout: Layout) -> None:
        self._search, self._layout = search, layout
        self._corners: dict[int, tuple[float, float]] = {}

    def __call__(self, tokens: float) -> tuple[float, float]:
        place = math.log(max(tokens, 1.0), 4)
        low = min(int(place), 11)
        part = min(place - low, 1.0)
        rank, hit = (a + part * (b - a) for a, b in zip(self._corner(low), self._corner(low + 1), strict=True))
        return max(rank, 1.0), hit

    def _corner(self, power: int) -> tuple[float, float]:
        if power not in self._corners:
            search, layout = self._search, self._layout
            assert search.skew is not None
            found = gamma(search.skew, search.model, float(4**power), layout.ep, search.placement, layout.redundant)
            self._corners[power] = found.rank, found.hit
        return self._corners[power]


def sensible(layout: Layout, model: ModelSpec, hardware: HardwareSpec) -> bool:
    """Whether a layout can be best. Tensor parallelism lies inside the scale-up domain and is at most 8 wide, or spans
    one whole instance of at most two such groups, which is quickest for a few requests. Experts are spread over as many
    ranks as the layout may have (with MLA in several groups those of a group, see `Layout.check`), or cut on all ranks
    of such an instance; what lies between has the costs of both."""
    experts = max((moe.num_experts for _, moe in model.moe_layers()), default=0)
    latent = any(layer.attention.kind == "mla" for layer, _ in model.layer_kinds)
    widest = layout.tp if latent and layout.tp > 1 and layout.dp > 1 else layout.devices
    most = max((each for each in divisors(layout.devices) if each <= min(experts, widest)), default=1)
    narrow = min(hardware.domain, 8)
    small = layout.devices <= 2 * narrow
    spread = layout.ep == most or (layout.ep == 1 and (not experts or small))
    return spread and (layout.tp <= narrow or (layout.dp == 1 and small))


def instance_layouts(search: Search, devices: int) -> Iterator[Layout]:
    """Layouts of one instance, with the fewest redundant experts that divide."""
    experts = max((moe.num_experts for _, moe in search.model.moe_layers()), default=0)
    seen: set[Layout] = set()
    for extra in sorted({-experts % ep if experts else 0 for ep in divisors(devices)} | {search.like.redundant}):
        for layout in layouts(search.model, devices, replace(search.like, redundant=extra)):
            least = max(search.like.redundant, 0)
            least += -(experts + least) % layout.ep if experts else 0
            if layout.redundant != least or layout in seen:
                continue
            if search.hardware.kind == "cpu" and not can_deploy(layout, search.model, search.hardware):
                continue
            seen.add(layout)
            if search.every or search.fixed or sensible(layout, search.model, search.hardware):
                yield layout


def allowed(search: Search, layout: Layout) -> bool:
    """Whether a layout has what instances that decode must have."""
    return all(getattr(layout, name) == value for name, value in search.fixed)


def instance_sizes(devices: int) -> list[int]:
    """Sizes of equal instances that use all devices."""
    return [size for size in divisors(devices) if devices // size <= 4096]


class Instance:
    """One instance of a layout: its cache and its times, kept as they are computed. `b_cap`: requests that fit, on
    average over their lives (the buffers of the exchange are made for as many); 0 if the weights do not."""

    def __init__(self, search: Search, layout: Layout) -> None:
        self.search, self.layout = search, layout
        self.setting = search.setting(layout)
        self._prompt: float | None = None
        self._streams: list[Candidate] | None = None
        found = budget(search.model, search.hardware, layout, search.load(None))
        self.b_cap = int(found.b_cap.value) if found.free.value > 0 else 0
        self.kv_token = found.kv_token.value

    @property
    def sent_seconds(self) -> float:
        """Seconds to send a prompt's cache rows over the links of the ranks that share it."""
        hardware = self.search.hardware
        return self.search.isl * self.kv_token / ((hardware.network_gbps or hardware.scaleup_gbps) * 1e9)

    def chunked(self, chunk: int) -> tuple[int, float, float]:
        """(steps that a prompt takes, its new tokens in each, mean of the tokens cached before)."""
        search = self.search
        new = max(1, round(search.isl * (1 - search.hit)))
        chunks = -(-new // chunk)
        return chunks, new / chunks, search.isl - new + new * (chunks - 1) / (2 * chunks)

    @property
    def prompt_seconds(self) -> float:
        """Seconds to compute a prompt on every rank at once."""
        if self._prompt is None:
            chunks, tokens, past = self.chunked(self.search.chunk)
            self._prompt = chunks * self.setting.prefill(self.layout.dp, tokens, past).seconds
        return self._prompt

    @property
    def prompt_rate(self) -> float:
        """Prompts a second if it does nothing else."""
        return self.layout.dp / self.prompt_seconds

    def at(self, chunk: int, batch: int) -> Candidate:
        """`batch` requests that decode here and have their prompts computed here, `chunk` tokens a step.

        A rank has a chunk in p = (b - 1) chunks / osl of its steps. Ranks that share experts wait for each other: a
        step has a prompt with 1 - (1 - p)^R, which costs what one rank's prompt does, and what further ranks' add.
        """
        search, dp = self.search, self.layout.dp
        streams = (float(batch), search.isl + search.osl / 2)
        step = self.setting.decode(*streams)
        chunks, tokens, past = self.chunked(chunk)
        often = (max(batch / dp, 1.0) - 1) * chunks * step.tokens / search.osl
        one = max(self.setting.mixed(streams, (1, tokens, past)).seconds - step.seconds, 0.0)
        many = one
        if dp > 1 and any(search.model.moe_layers()):
            many = max(self.setting.mixed(streams, (dp, tokens, past)).seconds - step.seconds, one)
        extra = often * many
        if many > one and often < 1:
            some = 1 - (1 - often) ** dp
            extra = some * one + max(dp * often - some, 0.0) / (dp - 1) * (many - one)
        tpot, share = (step.seconds + extra) / step.tokens, min(often, 0.99)
        own = search.known.front + chunks * (step.seconds + one + share * (many - one))
        ttft = own + 0.5 * (step.seconds + extra) + 0.5 * share / (1 - share) * own
        rate = batch / (ttft + (search.osl - 1) * tpot)
        found = self._candidate(batch, step, tpot, (ttft, rate, extra / (step.seconds + extra)))
        return replace(found, chunk=chunk)

    def chunks(self) -> list[int]:
        """Sizes of chunks worth a look: the one asked for, and an eighth where ranks wait for each other's prompts."""
        waits = self.layout.dp > 1 and any(self.search.model.moe_layers())
        return sorted({self.search.chunk, *([max(512, self.search.chunk // 8)] if waits else [])})

    def decode_only(self, batch: int) -> Candidate:
        """`batch` requests whose prompts are computed elsewhere: `rate` and `ttft` are still without that."""
        step = self.setting.decode(batch, self.search.isl + self.search.osl / 2)
        rate = batch / (self.search.osl * step.tpot)
        return self._candidate(batch, step, step.tpot, (step.tpot, rate, 0.0))

    @property
    def streams(self) -> list[Candidate]:
        """Without prompts, at the batches of `at_edges`."""
        if self._streams is None:
            self._streams = at_edges(self.search, self, self.decode_only)
        return self._streams

    def _candidate(self, batch: int, step: StepCost, tpot: float, rest: tuple[float, float, float]) -> Candidate:
        ttft, rate, share = rest
        return Candidate(layout=self.layout, instances=1, prefill=None, prefill_instances=0, batch=batch,
                         b_cap=self.b_cap, tpot=tpot, ttft=ttft, step=step, rate=rate, osl=self.search.osl,
                         prompt_share=share, chunk=self.search.chunk)  # fmt: skip

    def batches(self) -> list[int]:
        """Batches to look at: a rank's share doubles up to what fits."""
        found = [self.layout.dp << power for power in range(24)]
        kept = [batch for batch in found if batch <= self.b_cap]
        if kept and kept[-1] < self.b_cap:
            kept.append(self.b_cap // self.layout.dp * self.layout.dp)
        return sorted(set(kept))


def within(candidate: Candidate, search: Search, *, safe: bool) -> bool:
    """Whether the SLO is kept: by the upper end of the intervals (`safe`) or by the median."""
    tpot, ttft = search.known.spread(candidate.layout) if safe else (1.0, 1.0)
    return candidate.tpot * tpot <= search.slo.tpot and candidate.ttft * ttft <= search.slo.ttft


def edge(low: int, high: int, dp: int, good: Callable[[int], bool]) -> int:
    """The largest multiple of dp from `low` (good) to below `high` (not) that is good, to about 3 %."""
    while high - low > max(dp, low // 32):
        middle = (low + high) // 2 // dp * dp
        if middle <= low:
            break
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def at_edges(search: Search, instance: Instance, timed: Callable[[int], Candidate]) -> list[Candidate]:
    """An instance at doubling batches and at the largest within the SLO, by the intervals' ends and by the median."""
    found = {batch: timed(batch) for batch in instance.batches()}
    for safe in (True, False):
        kept = [batch for batch in found if within(found[batch], search, safe=safe)]
        beyond = [batch for batch in found if kept and batch > max(kept)]
        if kept and beyond:
            good = partial(_timed_within, search, timed, safe)
            batch = edge(max(kept), min(beyond), instance.layout.dp, good)
            found[batch] = timed(batch)
    return [found[batch] for batch in sorted(found)]


def _timed_within(search: Search, timed: Callable[[int], Candidate], safe: bool, batch: int) -> bool:
    return within(timed(batch), search, safe=safe)


def together(search: Search, instance: Instance, devices: int) -> list[Candidate]:
    """One layout that does both, on as many instances as the devices give."""
    copies = devices // instance.layout.devices
    return [
        replace(each, instances=copies, rate=each.rate * copies)
        for chunk in instance.chunks()
        for each in at_edges(search, instance, partial(instance.at, chunk))
    ]


def apart(search: Search, decode: Instance, prefill: Instance, devices: int) -> list[Candidate]:
    """Pools for prompts and for streams: the number of prefill instances that gives most, the others decode."""
    found = []
    if not (search.hardware.network_gbps or search.hardware.scaleup_gbps):
        return []
    for alone in decode.streams:
        best = None
        for count in range(1, devices // prefill.layout.devices + 1):
            instances = (devices - count * prefill.layout.devices) // decode.layout.devices
            if instances < 1:
                break
            rate = min(instances * alone.rate, PREFILL_LOAD * count * prefill.prompt_rate)
            each = _pair(search, alone, prefill, (instances, count, rate))
            if best is None or each.per_device > best.per_device:
                best = each
            if rate >= instances * alone.rate:
                break
        if best is not None:
            found.append(best)
    return found


def _pair(search: Search, alone: Candidate, prefill: Instance, sizes: tuple[int, int, float]) -> Candidate:
    instances, count, rate = sizes
    seconds = prefill.prompt_seconds
    load = rate / (count * prefill.prompt_rate)
    sent = prefill.sent_seconds
    late = max(sent - seconds, sent / len(search.model.layers))
    ttft = search.known.front + seconds + 0.5 * load / (1 - load) * seconds + late + alone.tpot
    return replace(alone, instances=instances, prefill=prefill.layout, prefill_instances=count, rate=rate, ttft=ttft)


def find(search: Search, devices: int | None = None) -> Found:
    """Search all deployments of so many devices (of `like.devices` by default).

    On CPUs it is this engine that is deployed, so what it lacks is refused. Raises SpecError if the model does not fit
    the devices in any layout, with the numbers.
    """
    devices = devices or search.like.devices
    if search.hardware.kind == "cpu":
        check_formats(search.like, search.model)
        if search.draft:
            raise SpecError("this engine drafts no tokens: leave --draft out on CPUs")
    candidates: list[Candidate] = []
    whole: list[Instance] = []
    refused: SpecError | None = None
    for size in instance_sizes(devices):
        for instance in (Instance(search, layout) for layout in instance_layouts(search, size)):
            try:
                points = together(search, instance, devices)
            except SpecError as error:  # links that the layout needs and the device has not
                refused = error
                continue
            whole += [instance] if points else []
            candidates += points if allowed(search, instance.layout) else []
    if not candidates:
        raise refused or SpecError(nothing_fits(search, devices))
    if search.apart and search.hardware.kind != "cpu":  # this engine's instances compute their prompts
        prefills = best_prefills(search, whole)
        for prefill in prefills:
            for decode in whole:
                if (decode.layout.tp == 1 or decode.layout.dp == 1) and allowed(search, decode.layout):
                    candidates += apart(search, decode, prefill, devices)
    return Found(tuple(candidates), front(candidates), best(candidates, search, safe=True),
                 best(candidates, search, safe=False))  # fmt: skip


def best_prefills(search: Search, whole: list[Instance]) -> list[Instance]:
    """The layout that computes most prompts a device within the TTFT, and the one that is first with one prompt."""
    quick = [each for each in whole if each.prompt_seconds <= search.slo.ttft] or whole
    most = max(quick, key=lambda each: each.prompt_rate / each.layout.devices)
    first = min(whole, key=lambda each: (each.prompt_seconds, each.layout.devices))
    return [most] if first is most else [most, first]


def best(candidates: list[Candidate], search: Search, *, safe: bool) -> Candidate | None:
    """Most tokens a second per device within the SLO. What comes within 2 % of it and leaves experts whole is taken
    first: narrow slices of experts are multiplied less well than the model of a step knows."""
    good = [each for each in candidates if within(each, search, safe=safe)]
    most = max((each.per_device for each in good), default=0.0)
    near = [each for each in good if each.per_device >= 0.98 * most]
    return max(near, key=lambda each: (each.layout.moe_tp == 1, each.per_device, -each.tpot), default=None)


def front(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats both per user and per device, fastest for the user first."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (-each.per_user, -each.per_device)):
        if not kept or each.per_device > kept[-1].per_device * (1 + 1e-9):
            kept.append(each)
    return tuple(kept)


def nothing_fits(search: Search, devices: int) -> str:
    """Why no layout holds the model, in one line."""
    spread = [
        budget(search.model, search.hardware, layout, search.load(None))
        for size in instance_sizes(devices)
        for layout in instance_layouts(search, size)
        if allowed(search, layout)
    ]
    if not spread and search.hardware.kind == "cpu":
        return (
            f"this engine has no such layout of {devices} devices for this model: experts lie whole on all ranks (--ep "
            "is tp x dp), and a dense model has the ranks of one group (--dp 1); leave --tp, --dp and --ep out"
        )
    if not spread:
        return f"no layout of {devices} devices divides this model; ask for --every, or another number of devices"
    least = min(spread, key=lambda each: each.used)
    return (
        f"the model does not fit on {devices} x {search.hardware.name}: the leanest layout needs "
        f"{least.used / 1e9:.1f} GB a device without any cache, of {least.capacity.value / 1e9:.1f}; use more devices, "
        f"or narrower weights than {search.like.weights}"
    )
