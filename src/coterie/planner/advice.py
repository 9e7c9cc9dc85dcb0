"""What a search is worth to who decides: why this layout, which limit binds, what would help most, how to start it.

Changes are tried, not guessed: each is the same instance with one thing different, timed at its own best batch. Not
here: the search (`search`), how it is printed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from coterie.planner.layout import WEIGHT_BITS, Layout
from coterie.planner.own import MOVE_STEPS, can_deploy, serve_command
from coterie.planner.search import Candidate, Found, Instance, Search, apart, together, within
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class Change:
    """One thing different: output tokens a second per device over those of the recommendation, and the new batch."""

    text: str
    factor: float
    batch: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a deployment costs. `per_million`: currency for a million output tokens, 0 without a price. `watts`: of all
    devices at their rated power, `joules` per output token, 0 where the device's power is not known."""

    per_million: float
    watts: float
    joules: float


def cost_of(candidate: Candidate, search: Search) -> Cost:
    """Money and power of a candidate; an hour of a device costs `price_hour`."""
    tokens = candidate.rate * candidate.osl
    price = search.price_hour or search.hardware.price_hour
    watts = search.hardware.watts * candidate.devices
    return Cost(price * candidate.devices / 3600 / tokens * 1e6, watts, watts / tokens)


def binding(candidate: Candidate, search: Search, *, safe: bool = True) -> str:
    """What keeps the batch from growing: "B_cap" (memory), "B_SLO" (time per token), "TTFT", "prompts" (their pool is
    full), or "queue" (a larger batch gives no more, as prompts take the time)."""
    dp = candidate.layout.dp
    if candidate.batch + dp > candidate.b_cap:
        return "B_cap"
    instance = Instance(search, candidate.layout)
    alone = candidate.prefill is not None
    batch = candidate.batch + max(dp, candidate.batch // 16 // dp * dp)
    more = instance.decode_only(batch) if alone else instance.at(candidate.chunk, batch)
    if alone and candidate.rate < 0.999 * candidate.instances * instance.decode_only(candidate.batch).rate:
        return "prompts"
    tpot, ttft = search.known.spread(candidate.layout) if safe else (1.0, 1.0)
    if more.tpot * tpot > search.slo.tpot:
        return "B_SLO"
    if not alone and more.ttft * ttft > search.slo.ttft:
        return "TTFT"
    return "queue"


MEANING = {
    "B_cap": "memory: no more requests fit",
    "B_SLO": "time per token: a larger batch breaks the limit",
    "TTFT": "time to the first token: a larger batch breaks the limit",
    "prompts": "prompts: the instances that compute them are full",
    "queue": "prompts: a larger batch gives no more tokens a second",
}


def reason(chosen: Candidate, found: Found, search: Search, *, safe: bool = True) -> str:
    """Why this one, in one sentence with numbers."""
    good = [each for each in found.candidates if within(each, search, safe=safe)]
    rest = [each for each in good if (each.layout, each.prefill) != (chosen.layout, chosen.prefill)]
    second = max(rest, key=lambda each: each.per_device, default=None)
    text = (
        f"most tokens a second per device of {len(good)} points within the limits ({len(found.candidates)} looked at)"
    )
    if second is None:
        return text
    gain = 100 * (1 - second.per_device / chosen.per_device)
    behind = f"{gain:.0f} % behind" if gain >= 0.5 else "as good within 2 %"
    return f"{text}; the next layout is {describe(second)}, {behind}"


def unreachable(found: Found, search: Search) -> str:
    """Which term alone breaks the limits, where nothing keeps them."""
    fastest = min(found.candidates, key=lambda each: each.tpot)
    if fastest.tpot > search.slo.tpot:
        worst = max(fastest.step.ops, key=lambda op: op.seconds)
        return (
            f"no layout reaches {1e3 * search.slo.tpot:g} ms a token: the fastest, {describe(fastest)} at batch "
            f"{fastest.batch}, takes {1e3 * fastest.tpot:.1f} ms, of which {worst.name} alone is "
            f"{1e3 * worst.seconds / fastest.step.tokens:.1f} ms; allow more, or use more or faster devices"
        )
    first = min(found.candidates, key=lambda each: each.ttft)
    if first.ttft > search.slo.ttft:
        return (
            f"no layout gives the first token within {1e3 * search.slo.ttft:g} ms: computing the prompt of "
            f"{search.isl} tokens alone takes {1e3 * first.ttft:.0f} ms on {describe(first)}; allow more, shorten the "
            "prompt, or use more devices"
        )
    return (
        f"each limit can be kept, not both at once: {1e3 * search.slo.tpot:g} ms a token and {1e3 * search.slo.ttft:g} "
        f"ms to the first; the fastest first token, {1e3 * first.ttft:.0f} ms, has {1e3 * first.tpot:.1f} ms a token"
    )


def describe(candidate: Candidate) -> str:
    """A deployment in words."""
    text = f"{candidate.instances} x ({shape(candidate.layout)})"
    if candidate.prefill is not None:
        text += f" and {candidate.prefill_instances} x ({shape(candidate.prefill)}) for prompts"
    return text


def shape(layout: Layout) -> str:
    extra = f" +{layout.redundant} redundant" if layout.redundant else ""
    return f"tp {layout.tp} dp {layout.dp} ep {layout.ep}{extra}"


# What would help


def changes(chosen: Candidate, search: Search) -> list[Change]:
    """Single changes to the recommendation, the most helpful first; what does not fit or gains nothing is left out."""
    now = _best(search, chosen, chosen.layout)
    if now is None:
        return []
    found = []
    for text, changed, layout in _variants(chosen, search):
        if search.hardware.kind == "cpu" and not can_deploy(layout, search.model, search.hardware):
            continue
        try:
            best = _best(changed, chosen, layout)
        except SpecError:
            continue
        if best is not None and best.per_device > 1.01 * now.per_device:
            found.append(Change(text, best.per_device / now.per_device, best.batch))
    return sorted(found, key=lambda change: -change.factor)


def _best(search: Search, chosen: Candidate, layout: Layout) -> Candidate | None:
    """The best batch of one layout, within the SLO by the upper ends of the intervals; its prompts are computed as the
    chosen one's are, in the same formats."""
    instance = Instance(search, layout)
    if chosen.prefill is None:
        points = together(search, instance, layout.devices)
    else:
        formats = {name: getattr(layout, name) for name in ("weights", "attention", "kv")}
        prefill = Instance(search, replace(chosen.prefill, **formats))
        points = apart(search, instance, prefill, max(chosen.devices, layout.devices + prefill.layout.devices))
    good = [each for each in points if within(each, search, safe=True)]
    return max(good, key=lambda each: each.per_device, default=None)


def _variants(chosen: Candidate, search: Search) -> Iterator[tuple[str, Search, Layout]]:
    layout, hardware = chosen.layout, search.hardware
    for name in ("fp8", "fp4", "int8"):
        narrower = WEIGHT_BITS[name] < WEIGHT_BITS[layout.weights]
        if narrower and _has_unit(hardware, name):
            yield f"{name} weights", search, replace(layout, weights=name, attention=None)
    if layout.kv == "bf16":
        kind = "int8" if hardware.kind == "cpu" else "fp8"
        yield f"{kind} cache", search, replace(layout, kv=kind)  # type: ignore[arg-type]
    if not search.overlap and layout.dp > 1 and layout.ep > 1:
        yield "two micro-batches that overlap", replace(search, overlap=True), layout
    if not search.draft and search.model.mtp_layers and hardware.kind != "cpu":  # this engine drafts nothing
        yield "one drafted token (multi-token prediction)", replace(search, draft=1), replace(layout, mtp=True)
    if search.skew is not None and layout.ep > 1 and search.placement != "balanced":
        yield "experts placed by load", replace(search, placement="balanced"), layout
        copies = layout.redundant + layout.ep
        more = replace(layout, redundant=copies)
        yield f"experts placed by load, {copies} copies", replace(search, placement="balanced"), more
    spread = layout.ep > 1 or (hardware.kind == "cpu" and any(search.model.moe_layers()))
    wide = replace(layout, devices=2 * layout.devices, dp=2 * layout.dp, ep=2 * layout.ep if spread else 1)
    yield f"instances of {wide.devices} devices ({shape(wide)})", search, wide
    if search.utilisation < 0.95:
        yield "95 % of the memory in use", replace(search, utilisation=0.95), layout
    if search.hit < 0.5:
        yield "half of each prompt found in the prefix cache", replace(search, hit=0.5), layout


def _has_unit(hardware: HardwareSpec, name: str) -> bool:
    return bool({"fp8": hardware.fp8_tops, "fp4": hardware.fp4_tops, "int8": hardware.int8_tops}[name])


def sentences(found: Found, search: Search, name: str) -> list[str]:
    """The recommendation in sentences."""
    if found.safe is None and found.bold is None:
        return [unreachable(found, search)]
    lines = []
    for what, chosen in (("safe", found.safe), ("bold", found.bold)):
        if chosen is None:
            lines.append(f"{what}: none; only the median keeps the limits, the upper end of the interval does not")
            continue
        lines.append(f"{what}: {describe(chosen)}, batch {chosen.batch} an instance")
        lines.append(f"  why: {reason(chosen, found, search, safe=what == 'safe')}")
        lines.append(f"  binds: {MEANING[binding(chosen, search, safe=what == 'safe')]}")
    chosen = found.safe or found.bold
    assert chosen is not None
    for place, change in enumerate(changes(chosen, search)[:4]):
        lead, gain = "or" if place else "next-best change", 100 * (change.factor - 1)
        lines.append(f"  {lead}: {change.text}, {gain:+.0f} % tok/s a device at batch {change.batch}")
    cost = cost_of(chosen, search)
    if cost.per_million:
        lines.append(f"  cost: {cost.per_million:.3g} for a million output tokens")
    if cost.watts:
        lines.append(f"  power: {cost.watts / 1e3:,.3g} kW at rated power, {cost.joules:.3g} J a token")
    lines.append("start it with" if chosen.instances == 1 else "start each instance with")
    lines += [f"  {command}" for command in launch(chosen, name, search)]
    tpot, ttft = search.known.spread(chosen.layout)
    lines.append(f"times: {search.known.how}; 80 % intervals TPOT x or / {tpot:.2f}, TTFT x or / {ttft:.2f}")
    if flags := search.known.flags_of(chosen.layout):
        lines.append(f"flags: {', '.join(flags)}")
    return lines


# How to start it


def launch(chosen: Candidate, model: str, search: Search) -> list[str]:
    """Commands that start the recommendation, one for each role: this engine's on CPUs, SGLang's on accelerators (its
    --tp counts all devices of an instance, of which --dp groups have attention of their own)."""
    if search.hardware.kind == "cpu":
        return [_own(chosen, model, search)]
    if chosen.prefill is None:
        return [_sglang(chosen.layout, model, search, chosen.batch, chosen.chunk)]
    return [
        _sglang(chosen.prefill, model, search, 0, search.chunk) + " --disaggregation-mode prefill",
        _sglang(chosen.layout, model, search, chosen.batch, chosen.chunk) + " --disaggregation-mode decode",
    ]


def _own(chosen: Candidate, model: str, search: Search) -> str:
    layout = chosen.layout
    words = serve_command(layout, search.model, search.hardware, model)
    words += ["--max-running-requests", str(max(1, -(-chosen.batch // layout.dp)))]
    words += ["--chunked-prefill-size", str(chosen.chunk)]
    if search.placement == "balanced" and layout.ep > 1:
        words += ["--rebalance-steps", str(MOVE_STEPS)]
    if search.overlap and layout.dp > 1 and layout.ep > 1:
        words += ["--overlap", "on"]
    return shlex.join(words)


def _sglang(layout: Layout, model: str, search: Search, running: int, chunk: int) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", model, "--tp-size", str(layout.devices)]
    if layout.dp > 1:
        words += ["--dp-size", str(layout.dp), "--enable-dp-attention"]
    if layout.ep > 1:
        words += ["--ep-size", str(layout.ep)]
    if layout.ep > 1 and layout.dp > 1:
        words += ["--moe-a2a-backend", "deepep"]
    if layout.redundant:
        words += ["--ep-num-redundant-experts", str(layout.redundant), "--enable-eplb"]
    if layout.devices > search.hardware.domain:
        words += ["--nnodes", str(-(-layout.devices // search.hardware.domain)), "--node-rank", "RANK"]
        words += ["--dist-init-addr", "HOST:PORT"]
    if layout.kv.startswith("fp8"):
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if running:
        words += ["--max-running-requests", str(running)]
    if search.overlap:
        words += ["--enable-two-batch-overlap"]
    words += ["--chunked-prefill-size", str(chunk * layout.dp)]
    return shlex.join(words)
