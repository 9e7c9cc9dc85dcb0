"""Layout: how a model is laid over devices, and in which formats; refused with the valid ones where it cannot be.

tp ranks share requests (heads and columns of everything that is no expert), dp groups of them answer different
requests, so tp x dp = devices. Experts are spread over ep ranks, and where ep is smaller than the number of devices,
each expert is cut over the moe_tp = devices / ep ranks that hold the same ones. MLA's cache is not cut by tp.
Not here: bytes (`memory`), times (`cost`, `network`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import Fp8BlockQuant, ModelSpec, MoESpec
from coterie.spec.parallel import ExchangeDtype
from coterie.spec.stored import StoredScheme
from coterie.spec.tensor_split import check_tensor_split

WeightName = Literal["bf16", "fp8", "fp4", "int8", "int4"]
CacheName = Literal["bf16", "fp8", "fp8-scaled", "int8"]

WEIGHT_BYTES: dict[WeightName, float] = {
    "bf16": 2.0,
    "fp8": 1.0 + 4 / (128 * 128),
    "fp4": 0.5 + 1 / 16,
    "int8": 1.0 + 2 / 32,
    "int4": 0.5 + 2 / 32,
}
"""Bytes of a value with its scales: fp8 one float32 per 128 x 128 block, fp4 one byte per 16 (NVFP4), int8 and int4
an f16 per 32 (our engine's)."""
LEAST_TILES_RIDGE = 128.0
"""bf16 operations a byte above which a CPU has matrix units: vectors of published sockets do 32 to 76, AMX 234 on."""
WEIGHT_BITS: dict[WeightName, int] = {"bf16": 16, "fp8": 8, "fp4": 4, "int8": 8, "int4": 16}
"""Operand bits of the product: int4 is read and multiplied in 16 bits (weight only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Devices and their roles. `redundant`: expert slots beyond one for each expert. `weights` of the experts and of
    everything else that a checkpoint quantises; `attention` of the rest, None for the same. `kv`: format of the cache.
    `mtp`: whether the multi-token-prediction block is loaded. `exchange`: in which our engine's outputs come back from
    the experts of other ranks, None where other kernels exchange; `tiles`: whether its rows to bf16 experts travel as
    bf16 (its level with matrix units) and not as float32. Raises SpecError for what cannot be."""

    devices: int
    tp: int
    dp: int
    ep: int
    redundant: int = 0
    weights: WeightName = "fp8"
    attention: WeightName | None = None
    kv: CacheName = "bf16"
    mtp: bool = False
    exchange: ExchangeDtype | None = None
    tiles: bool = False

    def __post_init__(self) -> None:
        for name in ("devices", "tp", "dp", "ep"):
            if not 1 <= getattr(self, name) <= 65536:
                raise SpecError(f"{name} must be from 1 to 65536, not {getattr(self, name)}")
        if self.redundant < 0:
            raise SpecError(f"redundant experts must be at least 0, not {self.redundant}")
        if self.tp * self.dp != self.devices:
            raise SpecError(
                f"tp {self.tp} x dp {self.dp} = {self.tp * self.dp} ranks, not {self.devices}; valid for {self.devices}"
                f" devices are tp x dp of {valid_pairs(self.devices)}"
            )
        if self.devices % self.ep:
            raise SpecError(
                f"ep {self.ep} does not divide {self.devices} devices; valid are "
                f"{', '.join(map(str, divisors(self.devices)))}"
            )

    @property
    def moe_tp(self) -> int:
        """Ranks that share each expert."""
        return self.devices // self.ep

    def check(self, model: ModelSpec) -> None:
        """Raise SpecError if `model` cannot be laid out so: heads over tp, expert slots over ep."""
        check_tensor_split(model, self.tp)
        latent = any(layer.attention.kind == "mla" for layer, _ in model.layer_kinds)
        if latent and 1 < self.tp < self.ep and self.dp > 1:
            raise SpecError(
                f"tp {self.tp} x dp {self.dp} with ep {self.ep}: tp does not cut MLA's cache, so every request's would "
                f"lie on {self.tp} ranks; valid for {self.devices} devices are tp 1 x dp {self.devices}, "
                f"tp {self.devices} x dp 1, or ep of at most {self.tp}"
            )
        if (self.ep > 1 or self.redundant) and not any(model.moe_layers()):
            raise SpecError(f"{model.model_type} has no experts to spread or copy: leave out ep and redundant experts")
        for _, moe in model.moe_layers():
            if (moe.num_experts + self.redundant) % self.ep:
                least = -moe.num_experts % self.ep
                raise SpecError(
                    f"{moe.num_experts} experts and {self.redundant} redundant ones do not divide over ep {self.ep}; "
                    f"valid numbers of redundant experts are {least}, {least + self.ep}, {least + 2 * self.ep}, ..."
                )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def valid_pairs(devices: int) -> str:
    """The (tp, dp) pairs of so many devices, as text."""
    return ", ".join(f"{tp} x {devices // tp}" for tp in divisors(devices))


def layouts(model: ModelSpec, devices: int, like: Layout) -> Iterator[Layout]:
    """Every valid layout of `model` on so many devices, formats and extras as in `like`."""
    for tp in divisors(devices):
        for ep in divisors(devices):
            try:
                layout = replace(like, devices=devices, tp=tp, dp=devices // tp, ep=ep)
                layout.check(model)
            except SpecError:
                continue
            yield layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A layout as far as a user says it; None is chosen by `choose`."""

    tp: int | None = None
    dp: int | None = None
    ep: int | None = None
    redundant: int | None = None
    weights: WeightName | None = None
    attention: WeightName | None = None
    kv: CacheName = "bf16"
    mtp: bool = False
    exchange: ExchangeDtype | None = None


def choose(model: ModelSpec, hardware: HardwareSpec, devices: int, wish: Wish = Wish()) -> Layout:
    """Complete a wish. tp: 1 for MLA with experts, whose cache it does not cut, else what domain and heads allow.
    ep: the most that the devices and the number of experts allow. redundant: the fewest that divide. Raises SpecError
    for what cannot be, with what can."""
    if not 1 <= devices <= 65536:
        raise SpecError(f"devices must be from 1 to 65536, not {devices}")
    if wish.exchange is not None and hardware.kind != "cpu":
        raise SpecError(
            f"the format of what comes back is a choice of this engine on CPUs; on {hardware.name} leave it out"
        )
    tp, dp = wish.tp, wish.dp
    for name, number in (("tp", tp), ("dp", dp)):
        if number is not None and number < 1:
            raise SpecError(f"{name} must be at least 1, not {number}")
    if tp is None:
        tp = max(1, devices // dp) if dp is not None else _widest_tp(model, devices, hardware.domain)
    dp = max(1, devices // tp) if dp is None else dp
    stored, projections = stored_formats(model)
    experts = max((moe.num_experts for _, moe in model.moe_layers()), default=1)
    ep = max(each for each in divisors(devices) if each <= experts) if wish.ep is None else wish.ep
    layout = Layout(
        devices=devices,
        tp=tp,
        dp=dp,
        ep=ep,
        redundant=(-experts % ep if any(model.moe_layers()) else 0) if wish.redundant is None else wish.redundant,
        weights=wish.weights or stored,
        attention=wish.attention or (None if wish.weights else projections),
        kv=wish.kv,
        mtp=wish.mtp,
        exchange=(wish.exchange or "float32") if hardware.kind == "cpu" else None,
        tiles=hardware.kind == "cpu" and hardware.ridge > LEAST_TILES_RIDGE,
    )
    layout.check(model)
    return layout


def stored_formats(model: ModelSpec) -> tuple[WeightName, WeightName | None]:
    """(format of feed-forwards, format of attention) that a checkpoint holds; None: the same. Both bf16 if it is not
    quantised."""
    quant = model.quantization
    if quant is None:
        return "bf16", None
    if isinstance(quant, Fp8BlockQuant):
        return "fp8", None
    layer = f"model.layers.{len(model.layers) - 1}"
    names = ("mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w1", "mlp.up_proj")
    feed = quant.scheme_of(*(f"{layer}.{name}" for name in names))
    attention = quant.scheme_of(f"{layer}.self_attn.o_proj")
    weights = _format(feed)
    return weights, None if _format(attention) == weights else _format(attention)


def _format(scheme: StoredScheme | None) -> WeightName:
    if scheme is None:
        return "bf16"
    if scheme.layout == "fp8":
        return "fp8"
    if scheme.layout in ("mxfp4", "nvfp4"):
        return "fp4"
    return "int4" if scheme.bits <= 4 else "int8"


def nearest_format(bytes_per_value: float) -> WeightName:
    """The integer format, or bf16, whose size is nearest by ratio: for files with mixed or other formats."""
    known: tuple[WeightName, ...] = ("bf16", "int8", "int4")
    return min(known, key=lambda name: abs(math.log(WEIGHT_BYTES[name] / bytes_per_value)))


USUAL_TP = 8
"""Most ranks of a group where key heads are fewer: beyond them each rank repeats a head's cache, so that more devices
would hold fewer requests."""


def _widest_tp(model: ModelSpec, devices: int, domain: int) -> int:
    kinds = [layer for layer, _ in model.layer_kinds]
    if any(layer.attention.kind == "mla" for layer in kinds) and any(isinstance(each.ffn, MoESpec) for each in kinds):
        return 1
    heads = {layer.attention.num_heads for layer in kinds}
    most = min(domain, max(USUAL_TP, *(layer.attention.num_kv_heads for layer in kinds)))
    fits = [each for each in divisors(devices) if each <= most and all(count % each == 0 for count in heads)]
    return max(fits, default=1)
