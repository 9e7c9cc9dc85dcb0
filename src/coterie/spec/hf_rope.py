"""The rotary part of a config: both spellings to one RopeSpec, and YaRN's two separate factors.

Released files write `rope_theta` + `rope_scaling {type | rope_type, ...}`; transformers 5 writes `rope_parameters` with
`rope_theta` and `rope_type` inside. Both may be present if they agree. YaRN scales cos and sin by `attention_factor`
and, in MLA families, the softmax by m(mscale_all_dim)^2 (`softmax_factor`); neither depends on the allocated context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from coterie.spec.errors import SpecError
from coterie.spec.fields import MAX_INTEGER, Fields, is_integer, positive_number, same_value, short_text
from coterie.spec.model import RopeSpec
from coterie.spec.rope import yarn_mscale

_YARN_KEYS = frozenset(
    {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {"attention_factor", "truncate"}
)
_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": _YARN_KEYS,
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}
"""Scaling types that can be run, and the keys each one reads."""

_LEAST, _MOST = 1e-9, 1e15
_ABSENT: Mapping[str, Any] = {"rope_type": "default", "truncate": True}
"""What an absent key means where that is not the same as null: a null `truncate` does not truncate."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What the file says about rope once the spellings are unified."""

    owner: str
    theta: float
    kind: Literal["default", "linear", "yarn", "llama3"]
    partial: float
    values: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero; absent, null or 0 gives `default` when there is one."""
        value = self.values.get(key)
        if default is not None and (value is None or (value == 0 and not isinstance(value, bool))):
            return default
        if value is None:
            raise SpecError(f"{self.owner}: rope of type {self.kind!r} needs {key}, which is missing")
        return _moderate(self.owner, f"rope {key}", value)

    def mscale(self, key: str) -> float:
        """`mscale` or `mscale_all_dim`; 0 when absent, null or 0."""
        return self.number(key, 0.0)


def read_rope(fields: Fields, *, partial: bool) -> RopeConfig:
    """Unify the spellings; raises SpecError when they disagree or name a scaling that cannot be run.

    `partial`: whether the family can rotate only a share of the head's channels.
    """
    owner = fields.owner
    old, new = _section(fields, "rope_scaling"), _section(fields, "rope_parameters")
    if any(isinstance(value, Mapping) for value in new.values()):
        raise SpecError(f"{owner}: rope_parameters differ per layer kind ({', '.join(new)}), which is not supported")
    merged = _unify(owner, old, new)
    if {"rope_theta", "rope_parameters", "rope_scaling"}.intersection(merged):
        raise SpecError(f"{owner}: rope settings contain a nested rope field")
    theta = _shared(fields, "rope_theta", old, new)
    share = _shared(fields, "partial_rotary_factor", old, new)
    if share > 1 or (share != 1 and not partial):
        raise SpecError(f"{owner}: partial_rotary_factor={share} is not possible; expected 1" + " or less" * partial)
    kind = merged.pop("rope_type", None) or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise SpecError(f"{owner}: rope scaling of type {kind!r} is not supported; possible are {', '.join(_KEYS)}")
    unread = [key for key, value in merged.items() if key not in _KEYS[kind] and value is not None]
    if unread:
        raise SpecError(f"{owner}: rope scaling {kind!r} does not know {', '.join(sorted(unread))}")
    return RopeConfig(owner, theta, cast(Literal["default", "linear", "yarn", "llama3"], kind), share, merged)


def rope_spec(config: RopeConfig, head_dim: int, max_positions: int, *, interleaved: bool) -> RopeSpec:
    """The RopeSpec for a head (or MLA rope part) of `head_dim` channels, of which a share may be rotated."""
    dim = int(head_dim * config.partial)
    if dim < 2 or dim % 2:
        raise SpecError(f"{config.owner}: rope must rotate an even number of channels, not {dim} of {head_dim}")
    if config.kind == "default":
        return RopeSpec(dim, config.theta, interleaved)
    factor = config.number("factor")
    if config.kind == "linear":
        return RopeSpec(dim, config.theta, interleaved, "linear", factor)
    original = config.values.get("original_max_position_embeddings")
    if original is None:
        original = max_positions
    if not is_integer(original) or not 1 <= cast(int, original) <= MAX_INTEGER:
        text = f"rope original_max_position_embeddings={short_text(original)} is not possible"
        raise SpecError(f"{config.owner}: {text}; expected an integer from 1 to {MAX_INTEGER}")
    original = cast(int, original)
    if config.kind == "llama3":
        low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
        if high <= low:
            raise SpecError(f"{config.owner}: rope high_freq_factor={high} must be above low_freq_factor={low}")
        return RopeSpec(
            dim, config.theta, interleaved, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high
        )
    truncate = config.values.get("truncate", True)
    if config.theta <= 1 or truncate not in (None, True, False):
        raise SpecError(f"{config.owner}: YaRN needs rope_theta above 1 and truncate true or false")
    return RopeSpec(
        dim,
        config.theta,
        interleaved,
        "yarn",
        factor,
        original,
        beta_fast=config.number("beta_fast", 32.0),
        beta_slow=config.number("beta_slow", 1.0),
        attention_factor=_attention_factor(config, factor),
        truncate=bool(truncate),
    )


def softmax_factor(config: RopeConfig) -> float:
    """YaRN's share in MLA's softmax scale: m(mscale_all_dim)^2, or 1 without the field or without stretching."""
    all_dim = config.mscale("mscale_all_dim") if config.kind == "yarn" else 0.0
    return yarn_mscale(config.number("factor"), all_dim) ** 2 if all_dim else 1.0


def _attention_factor(config: RopeConfig, factor: float) -> float:
    """What the file says, else m(mscale) / m(mscale_all_dim) if both are given, else m(1)."""
    if config.values.get("attention_factor") is not None:
        return config.number("attention_factor")
    mscale, all_dim = config.mscale("mscale"), config.mscale("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def _section(fields: Fields, name: str) -> dict[str, Any]:
    """One spelling's mapping with `type` renamed to `rope_type`; empty when absent or null."""
    value = fields.raw(name) if name in fields else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"{fields.owner}: {name}={short_text(value)} is not possible; expected an object or null")
    section = dict(value)
    if not all(isinstance(key, str) for key in section):
        raise SpecError(f"{fields.owner}: {name} has a field name that is not text")
    kind = section.pop("type", None)
    if kind is not None and section.setdefault("rope_type", kind) != kind:
        raise SpecError(f"{fields.owner}: {name} says type={kind!r} and rope_type={section['rope_type']!r}")
    return section


def _unify(owner: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling settings of both spellings; theta and the partial factor are handled by `_shared`."""
    left, right = _settings(old), _settings(new)
    if old and new:
        for key in sorted({*left, *right}):
            a, b = (side.get(key, _ABSENT.get(key)) for side in (left, right))
            if not same_value(a, b):
                raise SpecError(f"{owner}: rope_scaling and rope_parameters disagree on {key}: {a!r} and {b!r}")
    return left or right


def _settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section without what `_shared` handles and without nulls that say nothing."""
    lifted = ("rope_theta", "partial_rotary_factor")
    return {
        key: value for key, value in section.items() if key not in lifted and (value is not None or key == "truncate")
    }


def _shared(fields: Fields, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """A value that may stand at the top level and inside either section; all that are given must agree."""
    given = [section[name] for section in (old, new) if section.get(name) is not None]
    if name in fields and fields.raw(name) is not None:
        given.insert(0, fields.raw(name))
    if not given:
        given = [fields.default(name)]
    if not all(same_value(given[0], value) for value in given):
        raise SpecError(f"{fields.owner}: {name} is given more than once and disagrees: {given!r}")
    return _moderate(fields.owner, name, given[0])


def _moderate(owner: str, label: str, value: Any) -> float:
    """A number above zero that no product or logarithm here takes out of the range of floats."""
    number = positive_number(owner, label, value)
    if not _LEAST <= number <= _MOST:
        raise SpecError(f"{owner}: {label}={number:g} is not possible; expected a number from {_LEAST:g} to {_MOST:g}")
    return number
