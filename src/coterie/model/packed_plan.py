"""Which tensors of a safetensors file make up one quantised weight, checked by name, type and shape.

A weight `X.weight` may lie as `X.weight_packed`, `X.qweight`, or bytes under its own name, with its scales and zero
points beside it. The scheme comes from `quantization_config`; whether a weight is packed, the names say. No data is
read.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import prod

from coterie.model.checkpoint import Problem
from coterie.model.formats.packed import PackedForm, code_format
from coterie.model.names import TensorEntry, file_name
from coterie.model.safetensors_io import StoredTensor
from coterie.spec.stored import StoredQuant, StoredScheme

_FLOATS = ("F32", "BF16", "F16")
_IGNORED = ("weight_shape", "input_scale", "input_zero_point", "input_global_scale")
_V4_EXPERTS = StoredScheme("mxfp4", 4, 32)
"""DeepSeek-V4's experts: e2m1 pairs as I8 under the plain name, `X.scale` with powers of two."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantised weight [rows, cols] and its side tables."""

    stored: PackedForm
    shape: tuple[int, int]
    scales: StoredTensor
    zeros: StoredTensor | None = None
    divisor: StoredTensor | None = None
    order: StoredTensor | None = None

    @property
    def sides(self) -> tuple[StoredTensor, ...]:
        return tuple(side for side in (self.scales, self.zeros, self.divisor, self.order) if side is not None)

    @property
    def must_be_whole(self) -> bool:
        """Whether the file holds the transpose, so that no row comes alone."""
        return self.stored.scheme.layout in ("awq", "gptq")


@dataclass(frozen=True, slots=True)
class Found:
    """A main tensor and what belongs to it, or what is wrong with them."""

    tensor: StoredTensor
    packed: Packed | None
    problem: Problem | None = None


def is_packed(stem: str, rest: Container[str]) -> bool:
    """Whether a weight lies packed, under a name of its own."""
    return f"{stem}.weight_packed" in rest or f"{stem}.qweight" in rest


def find_packed(
    canonical: str, entry: TensorEntry, rest: dict[str, StoredTensor], quant: StoredQuant | None, prefix: str
) -> Found | None:
    """Take a quantised weight's tensors out of `rest` (canonical names); None if `canonical` is not quantised there."""
    if not canonical.endswith(".weight"):
        return None
    stem = canonical.removesuffix(".weight")
    plain = rest.get(canonical)
    main = rest.get(f"{stem}.weight_packed") or rest.get(f"{stem}.qweight") or plain
    if main is None:
        return None
    v4 = quant is None and main.dtype == "I8" and f"{stem}.scale" in rest
    if main is plain and not v4 and not (main.dtype in ("I8", "F8_E4M3") and f"{stem}.weight_scale" in rest):
        return None
    parts = {
        name: rest.pop(f"{stem}.{name}", None)
        for name in (
            "weight_packed", "qweight", "weight", "weight_scale", "scale", "scales", "weight_zero_point", "qzeros",
            "weight_global_scale", "weight_g_idx", "g_idx", *_IGNORED,
        )
    }  # fmt: skip
    scheme = _V4_EXPERTS if v4 else _scheme(quant, stem, prefix)
    if scheme is None:
        reason = "config.json says that it is not quantised" if quant else "config.json has no quantization_config"
        return Found(main, None, Problem("format", f"{main.name!r} is packed, but {reason} that names it"))
    if parts["weight_g_idx"] is not None:
        text = f"{main.name!r} has inputs in another order (weight_g_idx), which is not supported; take one without"
        return Found(main, None, Problem("format", text))
    scales = parts["weight_scale"] or parts["scales"] or parts["scale"]
    if scales is None:
        return Found(main, None, Problem("missing", f"{main.name!r} has no table of scales"))
    rows, cols = prod(entry.shape[:-1]), entry.shape[-1]
    groups = _groups(scheme, scales, rows)
    stored = PackedForm(scheme, code_format(scheme, cols, groups, scales.dtype) if groups else None)
    packed = Packed(
        stored, (rows, cols), scales, parts["weight_zero_point"] or parts["qzeros"], parts["weight_global_scale"],
        parts["g_idx"],
    )  # fmt: skip
    wrong = _wrong(main, packed, groups)
    return Found(main, packed, Problem("shape", wrong) if wrong else None)


def _scheme(quant: StoredQuant | None, stem: str, prefix: str) -> StoredScheme | None:
    return None if quant is None else quant.scheme_of(stem, file_name(stem, prefix))


def _groups(scheme: StoredScheme, scales: StoredTensor, rows: int) -> int:
    """Scales of a row; 0 if their number fits no row."""
    count = prod(scales.shape)
    if scheme.layout in ("awq", "gptq"):
        return scales.shape[0] if len(scales.shape) == 2 and scales.shape[1] == rows else 0
    if count == 1:
        return 1
    return count // rows if count % rows == 0 else 0


def _wrong(main: StoredTensor, packed: Packed, groups: int) -> str | None:
    """What does not fit together, if anything."""
    scheme, (rows, cols) = packed.stored.scheme, packed.shape
    dtype, count = {
        "pack": ("I32", rows * -(-cols * scheme.bits // 32)),
        "int8": ("I8", rows * cols),
        "fp8": ("F8_E4M3", rows * cols),
        "mxfp4": (main.dtype if main.dtype in ("U8", "I8") else "U8", rows * cols // 2),
        "nvfp4": ("U8", rows * cols // 2),
        "awq": ("I32", cols * rows // 8),
        "gptq": ("I32", rows * -(-cols * scheme.bits // 32)),
    }[scheme.layout]
    if main.dtype != dtype or prod(main.shape) != count:
        asked = f"{scheme.layout} of {scheme.bits} bits needs {dtype}"
        return f"{main.name!r} is {main.dtype} {list(main.shape)}; a weight [{rows}, {cols}] as {asked}"
    expected = {0: 1, -1: 1}.get(scheme.group) or (-(-cols // scheme.group) if scheme.group > 0 else 0)
    if groups != expected:
        shape = list(packed.scales.shape)
        return f"{packed.scales.name!r} has shape {shape}; groups of {scheme.group} need {expected} a row"
    allowed = {"mxfp4": ("U8", "F8_E8M0"), "nvfp4": ("F8_E4M3",)}.get(scheme.layout, _FLOATS)
    if packed.scales.dtype not in allowed:
        return f"{packed.scales.name!r} is stored as {packed.scales.dtype}; scales can be {', '.join(allowed)}"
    if (scheme.layout == "nvfp4") != (packed.divisor is not None):
        return f"{main.name!r}: a weight_global_scale belongs to nvfp4, and only to it"
    return _wrong_zeros(main, packed, groups)


def _wrong_zeros(main: StoredTensor, packed: Packed, groups: int) -> str | None:
    scheme, (rows, cols) = packed.stored.scheme, packed.shape
    zeros = packed.zeros
    if scheme.symmetric or zeros is None:
        fits = scheme.symmetric == (zeros is None)
        return None if fits else f"{main.name!r}: its zero points and config.json disagree about whether there are any"
    words = -(-rows * scheme.bits // 32)
    count, dtype = (prod(packed.scales.shape), "I8") if scheme.layout == "int8" else (words * groups, "I32")
    if prod(zeros.shape) != count or zeros.dtype != dtype or len(main.shape) > 2:
        return f"{zeros.name!r} is {zeros.dtype} {list(zeros.shape)}, not {count} values of {dtype} in one matrix"
    order = packed.order
    if order is not None and (order.dtype != "I32" or prod(order.shape) != cols):
        return f"{order.name!r} is {order.dtype} {list(order.shape)}, not {cols} values of I32"
    return None
