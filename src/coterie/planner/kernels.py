"""Published times and rates of single kernels as cases of a fit: attention, products, grouped products, memory reads.

The form is a roofline with a constant: the longer of operations and bytes at a share of the device's peaks, plus what a
launch costs. What is computed follows from the row's name (shapes in it, or DeepSeek-V3's). Not here: whole steps.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from coterie.planner.bayes import Case, Form, Vector
from coterie.planner.data import Row
from coterie.planner.named import device_of, maker_of
from coterie.planner.phrases import Setup, setup
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec

PARAMETERS = ("compute", "memory", "launch", "bias")
"""What z multiplies: shares of the product and of the memory rate, the constant, and everything."""
LEVELS = ("all", "engine", "maker", "work", "work-hardware", "work-engine")
WIDTHS = (
    (0.15, 0.10, 0.35, 0.04),
    (0.1, 0.1, 0.3, 0.05),
    (0.2, 0.1, 0.35, 0.04),
    (0.25, 0.15, 0.3, 0.1),
    (0.05, 0.05, 0.1, 0.05),
    (0.1, 0.1, 0.2, 0.05),
)
RESIDUAL = (("work-engine", 1.5),)
NOISE = 0.06
COMPUTE_SHARE, MEMORY_SHARE = 0.65, 0.8
LAUNCH_SECONDS = {"mla-decode": 12e-6, "attention-prefill": 20e-6, "grouped-product": 35e-6, "product": 8e-6}
"""Launch and tail: a split decode joins its parts, grouped products are two kernels and an activation."""
LATENT, ROPE, HIDDEN, EXPERT_WIDTH, EXPERTS, TOP_K = 512, 64, 7168, 2048, 256, 8
"""DeepSeek-V3's, for rows that name no shape (config.json)."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one call does: operations at so many bits, and bytes."""

    name: str
    operations: float
    nbytes: float
    bits: int


def kernel_case(row: Row) -> tuple[Case, str]:
    """A row's case and the software it is about. Raises SpecError where it does not say what is computed."""
    said = setup(row)
    if not said.accelerators:
        raise SpecError(f"row {row.id} names no device")
    hw = device_of(said.accelerators[0][1])
    engine = said.engine.split("/")[0]
    if row.quantity == "rate":
        work, form = rate_form(row, hw)
        features = (0.0, 0.0)
    else:
        what = work_of(row, said)
        work, form = what.name, time_form(row, what, hw)
        features = (math.log(max(what.operations, 1)) / 2, math.log(max(what.nbytes, 1)) / 2)
    labels = ("all", engine, maker_of(hw), work, f"{work}/{hw.name}", f"{work}/{engine}")
    value = math.log(row.value) if row.value else math.nan
    return Case(row.id, form, labels, features, NOISE, value), engine


def _whole(pattern: str, text: str, otherwise: int) -> int:
    found = re.search(pattern, text, re.I)
    return int(found[1]) if found else otherwise


def work_of(row: Row, said: Setup) -> Work:
    """Operations and bytes of one call."""
    text = f"{row.model} {row.parallelism}"
    bits = 8 if said.experts in ("fp8", "int8") else 4 if said.experts == "fp4" else 16
    width = bits / 8
    batch = said.load.per_rank or said.load.requests or said.load.tokens or 1.0
    length = said.isl or 4096.0
    heads = _whole(r"(\d+) heads", text, 128)
    if re.search(r"mla.*decode|decode.*mla", text, re.I):
        each = batch * length
        return Work("mla-decode", 2.0 * heads * each * (2 * LATENT + ROPE), each * (LATENT + ROPE) * max(width, 1), 16)
    if re.search(r"prefill", text, re.I):
        pairs = batch * length * length / 2
        return Work("attention-prefill", 2.0 * heads * pairs * (192 + 128), batch * length * heads * 320 * 2, 16)
    if re.search(r"grouped|experts", text, re.I):
        ranks = said.decode.ep if said.decode else 1
        local = _whole(r"(\d+) experts/GPU", text, EXPERTS // ranks)
        rows = batch * TOP_K
        hit = local * (1 - (1 - TOP_K / EXPERTS) ** (batch * ranks))
        values = 3 * HIDDEN * EXPERT_WIDTH
        return Work("grouped-product", 2.0 * rows * values, hit * values * width, bits)
    shape = re.search(r"m\s*(\d+)\s*,?\s*k\s*(\d+)\s*,?\s*n\s*(\d+)", text, re.I)
    if shape or re.search(r"gemm", text, re.I):
        m, k, n = (int(shape[i]) for i in (1, 2, 3)) if shape else (int(batch), HIDDEN, HIDDEN)
        return Work("product", 2.0 * m * k * n, (k * n + m * k) * width + 2.0 * m * n, bits)
    raise SpecError(f"row {row.id} does not say what {row.model!r} computes")


def time_form(row: Row, work: Work, hw: HardwareSpec) -> Form:
    """Log of a call's time in the row's unit."""
    scale = 1e3 if row.unit.lower().startswith("ms") else 1e6

    def form(z: Vector) -> float:
        compute = work.operations / (hw.rate(work.bits) * min(1.0, COMPUTE_SHARE * math.exp(z[0])))
        memory = work.nbytes / (hw.memory_rate * min(1.0, MEMORY_SHARE * math.exp(z[1])))
        return math.log((max(compute, memory) + LAUNCH_SECONDS[work.name] * math.exp(z[2])) * scale) + z[3]

    return form


def rate_form(row: Row, hw: HardwareSpec) -> tuple[str, Form]:
    """What reaches which rate, and its log in the row's unit: operations in 1e12, bytes in 1e9."""
    text = f"{row.model} {row.parallelism} {row.precision}".lower()
    memory = "b/s" in row.unit.lower()
    if memory:
        work = "read" if "read" in text else "memory-bound"
        return work, lambda z: math.log(hw.memory_gbps * MEMORY_SHARE * 1.1) + z[1] - z[3]
    kind = "product" if "gemm" in text else "attention-prefill" if "prefill" in text else "mla-decode"
    work = f"{'sparse-' if 'sparse' in text else ''}{kind}-peak"
    narrow = re.search(r"fp8(?! kv)|int8", text) is not None
    bits = 8 if narrow and kind == "product" else 16
    least = 0.75 if "sparse" in text else 1.15
    return work, lambda z: math.log(hw.rate(bits) / 1e12 * COMPUTE_SHARE * least) + z[0] - z[3]
