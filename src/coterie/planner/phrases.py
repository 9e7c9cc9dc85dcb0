"""What a row's free text means: engine, device and count, parallel degrees, pools, formats, load, speculation.

`setup(row)` reads every form that the shipped table uses and close relatives of them (SGLang's, TensorRT-LLM's and
vLLM's ways of writing degrees). What is not said stays None or 0 and is filled in, with a wider interval, where the
answer is computed. Not here: names of models and devices (`planner/models.py`, `devices.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from coterie.planner.data import Row, number

_ENGINES: tuple[tuple[str, str], ...] = (
    (r"sglang\s*\+\s*ktransformers|ktransformers", "ktransformers"),
    (r"ik_llama", "ik_llama.cpp"),
    (r"llama\.?cpp", "llama.cpp"),
    (r"sglang cpu", "sglang-cpu"),
    (r"sglang", "sglang"),
    (r"trt-?llm|tensorrt", "trtllm"),
    (r"vllm", "vllm"),
    (r"cloudmatrix", "cloudmatrix"),
    (r"deepep v2", "deepep-v2"),
    (r"deepep.*low.?latency", "deepep-low-latency"),
    (r"deepep.*normal|deepep", "deepep-normal"),
    (r"pplx", "pplx"),
    (r"one.?sided", "one-sided"),
    (r"nccl", "nccl"),
    (r"flashmla", "flashmla"),
    (r"deepgemm", "deepgemm"),
    (r"flashinfer", "flashinfer"),
    (r"\bfa[234]\b|flash.?attention", "flashattention"),
    (r"in-house|deepseek", "deepseek"),
)
_SOURCES: tuple[tuple[str, str], ...] = (
    (r"lmsys\.org|sgl-project|\bsglang\b", "sglang"),
    (r"TensorRT-LLM", "trtllm"),
    (r"vllm", "vllm"),
    (r"deepseek-ai/(open-infra|profile)|2405\.04434|2412\.19437", "deepseek"),
    (r"2506\.12708", "cloudmatrix"),
    (r"InferSim", "sglang"),
)

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Pool:
    """So many groups of devices, each laid out alike. moe_tp: ranks that share an expert."""

    count: int
    tp: int
    dp: int
    ep: int

    @property
    def devices(self) -> int:
        """Devices of one group."""
        return self.tp * self.dp

    @property
    def moe_tp(self) -> int:
        return max(1, self.devices // self.ep)


@dataclass(frozen=True, slots=True)
class Load:
    """requests: in the system at once (None: not said). per_rank: requests of one attention rank. tokens: prompt
    tokens a device computes at once. open: "max" (as many as fit), "production", "given" or "none"."""

    open: Literal["given", "max", "production", "none"] = "none"
    requests: float | None = None
    per_rank: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """A row's text as values. `hosts`, `accelerators`: (count, name) of CPUs and of everything else. `drafts`: tokens
    speculated a step, `accepted`: tokens a step yields (1 without). `hit`: share of prompt tokens found in a cache.
    `user_speed`: tokens a second of each user that a figure is for; `slo`: seconds that a token may take."""

    engine: str
    version: str
    phase: Phase
    hosts: tuple[tuple[int, str], ...]
    accelerators: tuple[tuple[int, str], ...]
    devices: int | None
    prefill: Pool | None
    decode: Pool | None
    disaggregated: bool
    experts: str
    others: str
    load: Load
    isl: float | None
    osl: float | None
    context: float | None
    redundant: int = 0
    slots: int = 0
    drafts: int = 0
    accepted: float = 1.0
    overlap: bool = False
    balanced: bool = False
    hit: float = 0.0
    user_speed: float | None = None
    slo: float | None = None
    threads: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def on_cpu(self) -> bool:
        """Whether experts are computed on CPUs."""
        return bool(self.hosts)


def engine_of(row: Row) -> str:
    """Name of the software, from the text, then from who published it."""
    text = f"{row.parallelism} {row.metric}".lower()
    for pattern, name in _ENGINES:
        if re.search(pattern, text):
            return "sglang-cpu" if name == "sglang" and _CPU.search(row.hardware) else name
    for pattern, name in _SOURCES:
        if re.search(pattern, row.source, re.I):
            return name
    return "unknown"


_CPU = re.compile(r"xeon|epyc|ryzen|threadripper|core i\d|core ultra|graviton|kunpeng|granite|emerald|sapphire", re.I)


def parts_of(hardware: str) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
    """CPUs and accelerators of "2x Xeon Gold 6454S (8ch DDR5-4800 each) + RTX 4090"; names of networks are left out."""
    hosts: list[tuple[int, str]] = []
    others: list[tuple[int, str]] = []
    for piece in re.split(r"\s+\+\s+", hardware.strip()):
        found = re.match(r"\s*(\d+)\s*[xX×]\s*(.*)", re.sub(r"(.*\S)\s+[xX×]\s*(\d+)$", r"\2x \1", piece.strip()))
        count, name = (int(found[1]), found[2]) if found else (1, piece.strip())
        if _CPU.search(name):
            hosts.append((count, name))
        elif name and not re.match(r"cx\d|ib\b|ibgda|infiniband|roce|ethernet|nvlink$|efa", name, re.I):
            name = re.sub(r"\b[xX](\d+)\b|\(simulated\)", "", name)
            others.append((count, re.sub(r"\s+", " ", name).strip()))
    return tuple(hosts), tuple(others)


def _degree(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, re.I)
    return int(found[1]) if found else None


def pool_of(text: str, devices: int | None) -> Pool | None:
    """Degrees of one group from "TP8 moeTP8 EP1", "TP1 DPattn64 moeTP8 EP8", "EP32+DP32", "TP8 (attention DP)",
    "attention DP16 + EP16", "DP+EP8", "TP8, experts EP2xTP4", "DEP8". None where nothing is said."""
    both = _degree(r"\bDEP(\d+)", text)
    ep = both or _degree(r"(?<![A-Za-z])EP\s*(\d+)", text)
    if ep is None and devices and devices > 8 and re.search(r"\bEP\b|wide.?ep|expert parallel", text, re.I):
        ep = devices
    dp = both or _degree(r"(?<![A-Za-z])DP(?:attn)?\s*(\d+)", text)
    cut = re.sub(r"EP\s*\d+\s*[xX×]\s*TP\s*\d+|moe[-_ ]?TP\s*\d+", "", text)
    tp = _degree(r"(?<![A-Za-z])TP\s*(\d+)", cut)
    attention_dp = bool(re.search(r"attention DP\b(?!\d)|attn DP\b|dp.?attention", text, re.I))
    if tp and dp and re.search(r"attention DP\s*\d|dp.?attn\s*\d", text, re.I) and devices and tp * dp > devices:
        tp = max(1, tp // dp)
    if attention_dp and tp and not dp:
        tp, dp, ep = 1, tp, ep or (1 if re.search(r"moe[-_ ]?TP\s*[2-9]", text, re.I) else tp)
    if ep and not tp and not dp:
        tp, dp = 1, ep
    if tp is None and dp is None:
        return None
    tp, dp = tp or 1, dp or 1
    if re.search(r"DP\s*\+\s*EP", text) and ep:
        tp, dp = 1, ep
    if devices and tp * dp < devices and ep and ep > tp * dp:
        dp = ep // tp
    ep = ep or (tp * dp if re.search(r"expert parallel|wide.?ep|\bep\b", text, re.I) else 1)
    return Pool(1, tp, dp, min(ep, tp * dp))


def _pools(row: Row, devices: int | None) -> tuple[Pool | None, Pool | None, bool]:
    """The groups that prefill and that decode, and whether they are apart."""
    text = f"{row.parallelism} {row.devices if 'EP' in row.devices else ''}"
    found = re.findall(r"\b([PD])\s*(\d+)\s*x\s*\(([^)]*)\)", text)
    if found:
        pools = {}
        for letter, count, inner in found:
            pool = pool_of(inner, None)
            if pool is not None:
                pools[letter] = Pool(int(count), pool.tp, pool.dp, pool.ep)
        return pools.get("P"), pools.get("D"), True
    apart = bool(re.search(r"\bPD\b|disagg", text, re.I))
    pool = pool_of(text, devices)
    return pool, pool, apart


def formats_of(precision: str) -> tuple[str, str]:
    """Formats of experts and of everything else: "fp8", "fp4", "int8", "int4", "bf16", or GGUF's as bits, "q4.8"."""
    text = precision.lower()
    gguf = re.search(r"(?:iq|q)(\d)_(\w+)", text)
    if gguf:
        bits = {"2": 3.0, "3": 3.9, "4": 4.85, "5": 5.7, "6": 6.6, "8": 8.5}.get(gguf[1], 4.85)
        if text.strip().startswith("iq"):
            bits -= 0.35
        return f"q{bits}", f"q{bits}"
    if "int4 cpu" in text or "int4 experts" in text:
        return "int4", "fp8" if "fp8" in text else "int8"
    if "int8 cpu" in text:
        return "int8", "int4" if "int4" in text else "int8"
    experts = ""
    for pattern, name in (
        (r"nvfp4|mxfp4|fp4", "fp4"), (r"mxfp8|fp8", "fp8"), (r"int4|awq|w4a16|gptq", "int4"), (r"int8|w8a8", "int8"),
        (r"bf16|fp16|bfloat16", "bf16"),
    ):  # fmt: skip
        if re.search(pattern, text):
            experts = name
            break
    others = experts
    if re.search(r"bf16 (attention|mla|mha)", text):
        others = "bf16"
    elif experts == "fp4":
        others = "fp8" if "fp8" in text else "bf16"
    return experts, others


def load_of(text: str) -> Load:
    """ "128 concurrent", "256/GPU", "16384 tokens/GPU", "512 prompts", "max load (offline)", "production mix", "1"."""
    lower = text.lower()
    value = number(lower)
    if "production" in lower:
        return Load("production", per_rank=None)
    if value is None:
        return Load("max") if re.search(r"max|full|offline|saturat", lower) else Load()
    if "token" in lower:
        return Load("given", tokens=value)
    if re.search(r"/\s*(gpu|npu|rank|chip|device)|per (gpu|rank)", lower):
        return Load("given", per_rank=value)
    return Load("given", requests=value)


_ACCEPTED = {0: 1.0, 1: 1.85, 2: 2.4, 3: 2.8, 4: 3.0}
"""Tokens a step yields with so many drafts: DeepSeek-V3's report gives 1.85 to 1.9 for one (arXiv 2412.19437)."""


def speculation_of(text: str) -> tuple[int, float]:
    """Drafts and tokens a step: "MTP1 (1.92 tokens/step)", "simulated MTP (60% acceptance)", "no MTP"."""
    if re.search(r"\bno (mtp|spec)|without mtp", text, re.I):
        return 0, 1.0
    found = re.search(r"\b(?:MTP|eagle|nextn)[-_ ]?(\d)?", text, re.I)
    if found is None:
        return 0, 1.0
    drafts = int(found[1] or 1)
    accepted = _ACCEPTED.get(drafts, 3.0)
    rate = re.search(r"(\d+\.?\d*)\s*%\s*accept", text, re.I)
    if rate:
        share = float(rate[1]) / 100
        accepted = sum(share**power for power in range(drafts + 1))
    said = re.search(r"(\d+\.?\d*)\s*tokens?\s*/\s*step", text, re.I)
    if said:
        accepted = float(said[1])
    elif "relaxed" in text.lower():
        accepted *= 1.15
    return drafts, accepted


def setup(row: Row) -> Setup:
    """A row's text as values."""
    text, metric = row.parallelism, f"{row.metric} {row.unit}"
    hosts, accelerators = parts_of(row.hardware)
    devices = int(number(row.devices) or 0) or (None if hosts else accelerators[0][0] if accelerators else None)
    if not row.devices and accelerators and accelerators[0][0] == 1:
        devices = None
    engine = engine_of(row)
    prefill, decode, apart = _pools(row, devices)
    phase: Phase = "both"
    if row.quantity == "prefill" or re.match(r"prefill", text, re.I):
        phase = "prefill"
    elif row.quantity == "decode" or re.match(r"decode", text, re.I):
        phase = "decode"
    experts, others = formats_of(row.precision)
    load = load_of(row.load)
    batch = _degree(r"decode bs (\d+)", text)
    if batch and load.per_rank is None:
        load = Load(load.open, load.requests, float(batch), load.tokens)
    context = number(row.isl) if re.search(r"kv|context", row.isl, re.I) else None
    drafts, accepted = speculation_of(text)
    version = re.search(r"(?:sglang|trtllm|vllm|ktransformers)\s+v?(\d[\w.\-]*)", text, re.I)
    hit = re.search(r"(\d+\.?\d*)\s*% of input hit", metric)
    speed = re.search(r"(?:at|>=?|≥)\s*(\d+\.?\d*)\s*tok/s/user", text)
    limit = re.search(r"(?:TPOT|ITL)\s*(?:<=?|≤|under|at)\s*(\d+\.?\d*)\s*ms", text, re.I)
    return Setup(
        engine=engine, version=version[1] if version else "", phase=phase, hosts=hosts, accelerators=accelerators,
        devices=devices, prefill=prefill, decode=decode, disaggregated=apart, experts=experts, others=others,
        load=load, isl=None if context else number(row.isl), osl=number(row.osl), context=context,
        redundant=_degree(r"(\d+) redundant", text) or 0, slots=_degree(r"(\d+) slots", text) or 0,
        drafts=drafts, accepted=accepted,
        overlap=bool(re.search(r"\bTBO\b|2 micro-?batches|two.batch|(?<!before )\b[DS]BO\b", text)),
        balanced=bool(re.search(r"balanced routing|perfect EPLB", text, re.I)),
        hit=float(hit[1]) / 100 if hit else 0.0, user_speed=float(speed[1]) if speed else None,
        slo=float(limit[1]) / 1e3 if limit else None,
        threads=_degree(r"(\d+) threads", text + " " + row.hardware),
    )  # fmt: skip
