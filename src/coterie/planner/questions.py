"""A row about a served model as a case of the fit: its form in the row's unit, its groups, and what had to be assumed.

What a row does not say is filled in by rules that hold for all rows alike and are listed in `Question.assumed`; each
widens the answer. Not here: the forms (`served`, `hosts`), the fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from coterie.planner.bayes import Case, Vector
from coterie.planner.data import Row
from coterie.planner.layout import WEIGHT_BYTES
from coterie.planner.named import architecture, device_of, larger_domain, layout_of, maker_of, model_of, weight_name
from coterie.planner.phrases import Pool, Setup, setup
from coterie.planner.served import (
    Served,
    Timer,
    busy_share,
    capacity,
    decoding,
    first_token_timer,
    output_rate,
    prefill_rate,
    streams_within,
    token_timer,
    total_rate,
    whole_timer,
)
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec, MoESpec

LEVELS = (
    "all", "engine", "architecture", "maker", "hardware", "engine-architecture", "engine-architecture-hardware",
    "engine-model", "release", "quantity", "run",
)  # fmt: skip
HOT = 1.15
"""Busiest rank over the mean where experts are balanced from time to time (see `plan imbalance`)."""
NODE_DEVICES = 8
LARGEST_BATCH = 2048.0
"""Streams of one attention group that engines admit by default at most (TensorRT-LLM's max_batch_size)."""
PRODUCTION_BATCH = 96.0
"""Streams of a device in a production mix: what DeepSeek's published throughput and speed a user agree on by Little's
law is 88."""
PREFILL_TOKENS = 16384.0
UNSAID = 2.0
"""How much noisier a row is that does not say how it was run: left-out ones are off by 40 to 60 %."""


@dataclass(frozen=True, slots=True)
class Question:
    """A row as a case. exact: its model is shipped, not guessed from its size. assumed: what the row did not say. busy:
    share of the time that prompts are computed."""

    case: Case
    busy: Timer
    exact: bool
    assumed: tuple[str, ...]


def serving_question(row: Row, noise: float) -> Question:
    """A row about a model served on accelerators. Raises SpecError where it says too little or cannot be."""
    said = setup(row)
    _, spec, exact = model_of(row.model)
    served, assumed = served_of(row, said)
    kind, engine, hardware = architecture(spec), said.engine, served.hw.name
    if not exact and re.search(r"V3\.2|DSA|sparse", row.model):
        kind += "-sparse"
    mode = "apart" if served.apart else "wide" if served.decode.dp > NODE_DEVICES else "together"
    quantity = "tpot" if row.quantity == "speed" else row.quantity
    labels = (
        "all", engine, kind, maker_of(served.hw), hardware, f"{engine}/{kind}", f"{engine}/{kind}/{hardware}",
        f"{engine}/{spec.num_parameters / 1e9:.1f}B", f"{engine}/{release(said.version)}/{mode}/{said.experts}",
        quantity, f"{engine}/{kind}/{hardware}/{mode}/{quantity}",
    )  # fmt: skip
    features = (
        math.log(max(served.per_pool / served.decode.dp, 1)) / 1.5, math.log(max(served.isl, 1)) / 1.5,
        math.log(max(served.osl, 1)) / 2, math.log(served.decode.devices),
    )  # fmt: skip
    timer, scale = timer_of(row, said, served), scale_of(row, said, served)
    log_value = math.log(row.value) if row.value else math.nan

    def form(z: Vector) -> float:
        return math.log(timer(z) * scale) + sign(row) * float(z[-1])

    case = Case(row.id, form, labels, features, noise * (UNSAID if assumed else 1.0), log_value)
    return Question(case, busy_share(served), exact, assumed)


def sign(row: Row) -> float:
    """Times grow and rates fall with what multiplies everything."""
    return 1.0 if row.quantity in ("tpot", "ttft", "e2e") else -1.0


def release(version: str) -> str:
    """A version's first two numbers."""
    return ".".join(version.split(".")[:2])


def timer_of(row: Row, said: Setup, served: Served) -> Timer:
    """The form of what is asked, in SI units."""
    forms: dict[str, Callable[[Served], Timer]] = {
        "tpot": token_timer, "ttft": first_token_timer, "prefill": prefill_rate, "decode": output_rate,
        "output": output_rate, "total": total_rate, "e2e": whole_timer,
    }  # fmt: skip
    if row.quantity == "speed":
        token = token_timer(served)
        return lambda z: 1 / token(z)
    if row.quantity == "total" and said.user_speed:
        return total_rate(served, 1 / said.user_speed)
    form = forms.get(row.quantity)
    if form is None:
        raise SpecError(f"no form answers the metric {row.metric!r} of row {row.id}")
    return form(served)


def scale_of(row: Row, said: Setup, served: Served) -> float:
    """From SI and one device to the row's unit and its devices."""
    unit = row.unit.lower()
    if row.quantity in ("tpot", "ttft", "e2e"):
        return 1e3 if unit.startswith("ms") else 1e6 if unit.startswith("us") else 1.0
    shown = 1 / (1 - said.hit) if "incl" in row.metric else 1.0
    if row.quantity == "speed" or row.per == "gpu":
        return shown
    pool = served.prefill if row.quantity == "prefill" else served.decode
    count = served.prefill_count if row.quantity == "prefill" else served.decode_count
    return shown * (NODE_DEVICES if row.per == "node" else float(pool.devices * count))


def served_of(row: Row, said: Setup) -> tuple[Served, tuple[str, ...]]:
    """What is served, and what had to be assumed about it."""
    assumed: list[str] = []
    _, spec, exact = model_of(row.model)
    if not exact:
        assumed.append("a description near the model, not its own")
    if not said.accelerators:
        raise SpecError(f"row {row.id} names no device")
    hw = larger_domain(device_of(said.accelerators[0][1]), row.hardware)
    pools = []
    for pool in (said.prefill, said.decode):
        if pool is None:
            pool = usual_pool(row, said, spec, hw)
            assumed.append(f"tp {pool.tp} dp {pool.dp} ep {pool.ep} on {pool.count} x {pool.devices} devices")
        pools.append(pool)
    prefill, decode = (layout_of(pool, said, spec) for pool in pools)
    if not said.experts:
        assumed.append("fp8 weights")
    isl, osl = said.isl, said.osl
    if isl is None:
        isl = said.context or 2048.0
        assumed.append(f"{isl:.0f} prompt tokens")
    if osl is None:
        osl = 1024.0
    context = said.context or isl + (osl / 2 if osl > 1 else 0)
    apart = said.disaggregated or said.phase != "both"
    served = Served(
        spec, hw, prefill, decode, pools[0].count, pools[1].count, apart, isl, osl, context, 1.0, draft=said.drafts,
        accepted=said.accepted, overlap=said.overlap,
    )  # fmt: skip
    wide = max(prefill.ep, decode.ep) > hw.domain
    if wide and not said.overlap and "before" not in row.parallelism:
        served = replace(served, overlap=True)
    if decode.ep >= 16 and not said.balanced:
        served = replace(served, gamma=HOT)
    served = replace(served, prompts=prompts_of(said, served))
    requests, guess = requests_of(row, said, served)
    if guess:
        assumed.append(guess)
    served = replace(served, requests=requests)
    if said.phase == "both" and osl > 1:
        served = decoding(served)
    return served, tuple(dict.fromkeys(assumed))


def usual_pool(row: Row, said: Setup, spec: ModelSpec, hw: HardwareSpec) -> Pool:
    """Where degrees are not said: tensor parallelism over as few devices as hold the model with room for a cache, in
    so many copies; expert parallelism over 32 where the text or a domain of 32 or more says so."""
    moe = any(isinstance(layer.ffn, MoESpec) for layer in spec.layers)
    if moe and (re.search(r"\bEP\b|wide|expert parallel", row.parallelism) or (hw.domain >= 32 and not said.devices)):
        ranks = said.devices or 32
        return Pool(1, 1, ranks, ranks)
    need = spec.num_parameters * WEIGHT_BYTES[weight_name(said.experts or "fp8")] / (0.7 * hw.memory_bytes)
    heads = spec.layers[0].attention.num_heads
    least = next((n for n in (1, 2, 4, 8, 16) if n >= need and heads % n == 0), 8)
    devices = said.devices or max(least, 8 if row.per == "node" or moe else 1)
    if said.devices is None and "best config" in row.parallelism:
        devices = least = max(8, least)
    least = min(least, devices)
    return Pool(max(1, devices // least), least, 1, 1)


def prompts_of(said: Setup, served: Served) -> float:
    """Prompts that an attention group computes at once."""
    if said.load.tokens:
        return max(1.0, said.load.tokens * served.prefill.tp / max(served.isl, 1.0))
    return max(1.0, PREFILL_TOKENS / max(served.isl, 1.0))


def requests_of(row: Row, said: Setup, served: Served) -> tuple[float, str]:
    """Streams at once over all decode pools, and what had to be assumed."""
    load = said.load
    groups = served.decode.dp * served.decode_count
    fits = capacity(served.model, served.hw, served.decode, (served.isl, served.osl)) * served.decode_count
    most = min(fits, LARGEST_BATCH * groups)
    limit = 1 / said.user_speed if said.user_speed else said.slo
    if load.requests:
        if (
            said.user_speed and said.devices is None
        ):  # of how many devices is not said: as many as hold them at the speed
            held = streams_within(served, 1 / said.user_speed, most)
            if load.requests > 1.5 * held:
                return held, f"{held:.0f} of the streams on each {served.decode.devices * served.decode_count} devices"
        return load.requests, ""
    if load.per_rank:
        return load.per_rank * served.decode.devices * served.decode_count, ""
    if limit:
        return streams_within(served, limit, most), "as many streams as keep to the time of a token"
    if load.open == "production":
        return min(fits, PRODUCTION_BATCH * groups), f"{PRODUCTION_BATCH:.0f} streams a group"
    if load.open == "max":
        return most, ""
    if row.quantity in ("ttft", "prefill"):
        return 1.0, ""
    return min(fits, 256.0 * groups), "256 streams a group or as many as fit"
