"""The model, device and layout that a published row means: its names are those of articles, not of files.

"DeepSeek-V3/R1", "Qwen3-235B-A22B-FP8", "DeepSeek-R1-Distill-Llama-70B", "H100 SXM", "2x Xeon 6980P MRDIMM". A model
that is not shipped but says its size ("120B-A5B") is described roughly, which its answer is flagged for. Not here: what
the rest of a row says (`planner/phrases.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import cast

from coterie.planner.devices import device
from coterie.planner.layout import CacheName, Layout, WeightName
from coterie.planner.models import model
from coterie.planner.phrases import Pool, Setup
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec

_MEANS: tuple[tuple[str, str], ...] = (
    (r"distill.*llama.*70b", "Llama-3.1-70B"),
    (r"llama-?3\.3.*70b", "Llama-3.1-70B"),
    (r"llama-?3\.1.*8b|distill.*llama.*8b", "Llama-3.1-8B"),
    (r"deepseek-?(v3|r1)|deepseek-v3\.1|r1/v3|v3/r1", "DeepSeek-R1"),
    (r"deepseek-?v2-?lite", "DeepSeek-V2-Lite"),
    (r"deepseek-?v2", "DeepSeek-V2"),
    (r"kimi-?k2", "Kimi-K2"),
    (r"glm-?4\.[56]-?air", "GLM-4.5-Air"),
    (r"glm-?4\.[5-7]$", "GLM-4.5"),
    (r"llama-?4-?maverick", "Llama-4-Maverick"),
    (r"gpt-?3\b", "GPT-3-175B"),
)


_SIZES: tuple[tuple[str, str], ...] = (
    (r"gpt-?oss-?120b", "117B-A5.1B"), (r"gpt-?oss-?20b", "21B-A3.6B"), (r"minimax-?m2", "230B-A10B"),
    (r"llama-?4-?scout", "109B-A17B"), (r"minimax-?(text|m1)", "456B-A45.9B"), (r"grok-?1", "314B-A86B"),
)  # fmt: skip
"""Sizes that model cards state, where a name does not."""


@cache
def model_of(text: str) -> tuple[str, ModelSpec, bool]:
    """(name, description, whether it is exact). Raises SpecError if the text names no model that we know of."""
    plain = re.sub(r"\s*\([^)]*\)", "", text).strip()
    if re.search(r"deepseek-?v3\.2", plain, re.I):  # its sparse attention has no description here
        return (*model("DeepSeek-V3"), False)
    candidates = [plain, *plain.split("/")]
    candidates += [re.sub(r"[-_ ](fp8|fp4|nvfp4|bf16|int8|instruct|it|base|\d{4})\b.*$", "", plain, flags=re.I)]
    candidates += [name for pattern, name in _MEANS if re.search(pattern, plain, re.I)]
    for candidate in candidates:
        try:
            return (*model(candidate), True)
        except (SpecError, OSError):
            continue
    sizes = next((size for pattern, size in _SIZES if re.search(pattern, plain, re.I)), plain)
    rough = rough_model(sizes)
    if rough is None:
        return (*model(plain), True)
    return plain, rough, False


def rough_model(name: str) -> ModelSpec | None:
    """A description from sizes in a name, "235B-A22B" or "70B": widths that published models of the size have."""
    mixed = re.search(r"(\d+\.?\d*)\s*([BT])[-_ ]?A(\d+\.?\d*)\s*B", name, re.I)
    dense = re.search(r"(\d+\.?\d*)\s*([BT])\b", name, re.I)
    found = mixed or dense
    if found is None:
        return None
    total = float(found[1]) * (1e12 if found[2].upper() == "T" else 1e9)
    active = float(mixed[3]) * 1e9 if mixed else total
    layers = round(min(126, max(24, 20 * (active / 1e9) ** 0.33 if mixed else 12 * (active / 1e9) ** 0.44)))
    hidden = 256 * max(4, round((active / (14 * layers)) ** 0.5 / 256))
    heads = max(16, 16 * round(hidden / 2048))
    spec = AttentionSpec("gqa", heads, 8, 128, 128, 1.0, RopeSpec(128, 1e6, False))
    vocabulary = 150_000
    own = layers * hidden * 128 * (2 * heads + 16) + vocabulary * hidden
    ffn: DenseSpec | MoESpec = DenseSpec(max(256, round((active - own) / (3 * hidden * layers))))
    if mixed:
        experts, top_k = 128, 8
        width = max(64, round((total - own - vocabulary * hidden) / (3 * hidden * layers * experts)))
        shared = max(0, round((active - own) / (3 * hidden * layers)) - top_k * width)
        ffn = MoESpec(experts, top_k, width, shared_intermediate_size=shared)
    return ModelSpec("rough", vocabulary, hidden, (LayerSpec(spec, ffn),) * layers, 1e-6, 1 << 17)


def architecture(spec: ModelSpec) -> str:
    """Class of models that are computed alike."""
    attention = spec.layers[-1].attention.kind
    return f"{attention}-{'moe' if any(isinstance(layer.ffn, MoESpec) for layer in spec.layers) else 'dense'}"


# Devices

_DEVICES: tuple[tuple[str, str], ...] = (
    (r"gb300", "gb300"), (r"gb200", "gb200"), (r"b300", "B300-SXM"), (r"b200", "b200"), (r"h200", "h200"),
    (r"h100.*pcie", "h100-pcie"), (r"h100", "h100"), (r"h800", "h800"), (r"h20\b|h20-", "h20"),
    (r"a100.*40", "a100-40gb"), (r"a100", "a100"), (r"a800", "a800"), (r"sm ?100", "b200"), (r"sm ?90", "h100"),
    (r"910c|cloudmatrix", "910c"), (r"910b", "910b"), (r"4090", "rtx4090"), (r"5090", "rtx5090"),
)  # fmt: skip
_HOSTS: tuple[tuple[str, float, float, float, int], ...] = (
    (r"6980p", 262, 79, 844.8, 128), (r"6454s", 72, 21, 307.2, 32), (r"8592", 125, 38, 358.4, 64),
    (r"8488c|8480|8490", 108, 34, 307.2, 48), (r"9654", 14.7, 33, 460.8, 96), (r"9755", 44, 101, 576, 128),
    (r"epyc", 4, 8, 307.2, 32), (r"threadripper", 8, 16, 166, 32), (r"ryzen|core", 2.3, 9.6, 83.2, 16),
    (r"xeon", 30, 9, 256, 32),
)  # fmt: skip
"""bf16 Tera-operations a second of matrix units where there are any; 8-bit Tera-operations of vector instructions
(cores x clock x 256 a cycle with AVX-512, 128 on Zen 4, 64 with AVX2); GB/s; cores of a socket: data sheets. The last
rows are what a server or desktop of 2023 has, where only the family is known."""


_FAMILIES = ("epyc", "threadripper", "ryzen|core", "xeon")


@cache
def device_of(text: str) -> HardwareSpec:
    """The accelerator of a row. Raises SpecError with near names."""
    try:
        return device(text)
    except SpecError:
        for pattern, name in _DEVICES:
            if re.search(pattern, text, re.I):
                return device(name)
        for word in re.split(r"[\s(]", text):
            try:
                return device(word)
            except SpecError:
                continue
        raise


_MAKERS: tuple[tuple[str, str], ...] = (
    ("amd", r"^amd|^mi\d{3}|instinct|radeon|epyc|ryzen|threadripper"), ("huawei", r"ascend|910[bc]|kunpeng"),
    ("google", r"tpu"), ("amazon", r"trainium|inferentia|graviton"),
    ("intel", r"intel|xeon|gaudi|^core|granite|emerald|\bamx\b"),
    ("nvidia", r"nvidia|geforce|rtx|^g?[abh]\d{2,3}\b|^[lv]\d{2,3}s?\b|grace"),
)  # fmt: skip


def maker_of(hw: HardwareSpec) -> str:
    """Who makes a device, from its name: what its software and links have in common. A name that is not known is a
    maker of its own, so nothing measured on others' devices is taken for its."""
    return next((maker for maker, names in _MAKERS if re.search(names, hw.name, re.I)), hw.name)


@cache
def host_of(text: str, matrix: bool) -> tuple[HardwareSpec, int]:
    """One socket of a row's CPU, with the rate of its matrix units or of vectors, and its cores; "12ch DDR5-4800" in
    the text beats the table."""
    _, tops, vector, rate, cores = _host_row(text)
    channels = re.search(r"(\d+)\s*ch[a-z]*\s*(?:DDR\d|MRDIMM)-(\d+)", text, re.I)
    if channels:
        rate = int(channels[1]) * int(channels[2]) * 8e-3
    spec = HardwareSpec(
        name=re.sub(r"\s*(\(| class| MRDIMM).*", "", text), kind="cpu", bf16_tops=tops if matrix else vector,
        int8_tops=2 * tops if matrix else vector, memory_gb=768, memory_gbps=rate, domain=2,
    )  # fmt: skip
    return spec, cores


def _host_row(text: str) -> tuple[str, float, float, float, int]:
    usual = ("", 5.0, 9.0, 200.0, 32)
    return next((host for host in _HOSTS if re.search(host[0], text, re.I)), usual)


def is_guessed_host(text: str) -> bool:
    """Whether only the family of a row's CPU is known, and neither its memory's rate."""
    return _host_row(text)[0] in ("", *_FAMILIES)


# Layouts


def weight_name(text: str) -> WeightName:
    """A row's format as a layout's."""
    return cast(WeightName, text if text in ("bf16", "fp8", "fp4", "int8", "int4") else "fp8")


def layout_of(pool: Pool, said: Setup, spec: ModelSpec) -> Layout:
    """A pool as a layout: experts that do not divide over ep get the redundant slots that make them."""
    redundant = said.redundant
    moe = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)]
    if moe and (moe[0].num_experts + redundant) % pool.ep:
        redundant += -(moe[0].num_experts + redundant) % pool.ep
    mla = spec.layers[0].attention.kind == "mla"
    narrow = said.experts == "fp4" or (said.experts == "fp8" and said.engine == "trtllm" and not mla)
    kv: CacheName = "fp8" if narrow else "bf16"  # NVIDIA's own quantised checkpoints keep their cache in fp8
    layout = Layout(
        devices=pool.devices, tp=pool.tp, dp=pool.dp, ep=pool.ep if moe else 1, redundant=redundant,
        weights=weight_name(said.experts or "fp8"), attention=weight_name(said.others or said.experts or "fp8"), kv=kv,
    )  # fmt: skip
    layout.check(spec)
    return layout


def larger_domain(hw: HardwareSpec, text: str) -> HardwareSpec:
    """The device with the scale-up domain that a row's text names ("NVL72")."""
    found = re.search(r"NVL(\d+)", text)
    return replace(hw, domain=int(found[1])) if found else hw
