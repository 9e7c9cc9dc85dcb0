"""Reading one config.json mapping: spellings unified, every value type-checked, every key accounted for.

`Fields` remembers which keys were read; `finish` sorts the rest into harmless ones, unknown ones that say nothing, and
unknown ones that may alter the mathematics, which are an error. It knows no family's meaning (`spec/hf.py` does).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.spec.errors import SpecError

ALIASES: Mapping[str, str] = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "moe_num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "moe_num_shared_experts": "n_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_mtp_modules": "num_nextn_predict_layers",
    "router_scaling_factor": "routed_scaling_factor",
    "dtype": "torch_dtype",
}
"""Other spellings of a key, and the one used here."""

MAX_INTEGER = 2**31 - 1

HARMLESS = frozenset(
    """
    model_type architectures auto_map transformers_version torch_dtype _name_or_path _commit_hash name_or_path
    _attn_implementation _attn_implementation_autoset _experts_implementation attn_implementation use_cache use_bfloat16
    initializer_range initializer_factor pretraining_tp tensor_parallel_degree ep_size seq_aux aux_loss_alpha
    router_jitter_noise return_dict chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention id2label
    label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix torchscript
    gradient_checkpointing use_return_dict model_max_length vision_config unsloth_fixed unsloth_version
    tie_encoder_decoder cross_attention_hidden_size pruned_heads tf_legacy_loss bad_words_ids suppress_tokens
    begin_suppress_tokens do_sample early_stopping encoder_no_repeat_ngram_size no_repeat_ngram_size length_penalty
    exponential_decay_length_penalty diversity_penalty repetition_penalty max_length min_length num_beams
    num_beam_groups num_return_sequences remove_invalid_values return_dict_in_generate temperature top_k top_p typical_p
    """.split()  # noqa: SIM905
)
_HARMLESS_PATTERNS = re.compile(
    r".*_token_ids?|.*_token_index|.*dropout(_prob|_rate)?|.*(aux|z)_loss(_coef|_alpha|_weight)?|output_[a-z_]+"
)


def is_harmless(key: str) -> bool:
    """Whether a key cannot alter what inference computes, whatever its value."""
    return key in HARMLESS or _HARMLESS_PATTERNS.fullmatch(key) is not None


def says_nothing(value: Any) -> bool:
    """Whether a value of an unknown key switches nothing on: null, false, or an empty container or string."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Keys nobody read: `ignored` cannot alter the mathematics; `unknown` are unheard of but say nothing."""

    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


class Fields:
    """Typed access to a config mapping under canonical names, over a family's table of defaults."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> None:
        self.owner = owner
        self._defaults = defaults
        self._values: dict[str, Any] = {}
        self._spelling: dict[str, str] = {}
        self._read: set[str] = set()
        for key, value in values.items():
            if not isinstance(key, str):
                raise SpecError(f"{owner}: the field name {key!r} is not text")
            name = ALIASES.get(key, key)
            if name in self._values and not same_value(self._values[name], value):
                first = f"{self._spelling[name]}={self._values[name]!r}"
                raise SpecError(f"{owner}: {first} and {key}={value!r} are one field and disagree")
            if name not in self._values:
                self._values[name], self._spelling[name] = value, key

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def known(self, name: str) -> bool:
        """Whether the file or the family's table has the key."""
        return name in self._values or name in self._defaults

    def default(self, name: str) -> Any:
        """The family's default."""
        return self._defaults[name]

    def has_default(self, name: str) -> bool:
        """Whether the family has the key at all."""
        return name in self._defaults

    def label(self, name: str) -> str:
        """The name as the file spells it."""
        return self._spelling.get(name, name)

    def raw(self, name: str) -> Any:
        """The value in the file, else the family's default; an error when there is neither."""
        self._read.add(name)
        if name in self._values:
            return self._values[name]
        if name in self._defaults:
            return self._defaults[name]
        spellings = " / ".join([name, *(alias for alias, target in ALIASES.items() if target == name)])
        raise SpecError(f"{self.owner}: required field {spellings} is missing and has no default for this family")

    def error(self, name: str, expected: str) -> SpecError:
        """A SpecError about the value of `name`."""
        given = f"{self.label(name)}={short_text(self.raw(name))}"
        return SpecError(f"{self.owner}: {given} is not possible; expected {expected}")

    def integer(self, name: str, minimum: int = 1) -> int:
        """An integer from `minimum` up; neither a boolean, a float nor text."""
        value = self.raw(name)
        if not is_integer(value) or not minimum <= value <= MAX_INTEGER:
            raise self.error(name, f"an integer from {minimum} to {MAX_INTEGER}")
        return int(value)

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """As `integer`, or None when the file says null."""
        return None if self.raw(name) is None else self.integer(name, minimum)

    def number(self, name: str) -> float:
        """A finite number greater than zero."""
        return positive_number(self.owner, self.label(name), self.raw(name))

    def flag(self, name: str) -> bool:
        """True or false; null counts as false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return bool(value)

    def integers(self, name: str) -> list[int]:
        """A list of non-negative integers; null counts as empty."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(is_integer(item) and item >= 0 for item in value):
            raise self.error(name, "a list of layer numbers")
        return [int(item) for item in value]

    def skip(self, *names: str) -> None:
        """Account for keys that this family carries without meaning."""
        self._read.update(name for name in names if name in self._values)

    def finish(self, skipped: tuple[str, ...] = (), *, strict: bool = False) -> Leftovers:
        """Sort the unread keys; one that may alter the mathematics is an error (`strict`: any unknown one)."""
        ignored: list[str] = []
        unknown: list[str] = []
        for name, value in self._values.items():
            key = self._spelling[name]
            if name in self._read:
                continue
            if name in skipped or is_harmless(key):
                ignored.append(key)
            elif says_nothing(value) and not strict:
                unknown.append(key)
            else:
                raise SpecError(
                    f"{self.owner}: unknown field {key}={short_text(value)}, which may alter the mathematics; "
                    "remove it if it is harmless, otherwise this model is not supported"
                )
        return Leftovers(tuple(sorted(ignored)), tuple(sorted(unknown)))


def is_integer(value: Any) -> bool:
    """An int that is not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive_number(owner: str, label: str, value: Any) -> float:
    """`value` as a finite float greater than zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise SpecError(f"{owner}: {label}={short_text(value)} is not possible; expected a finite number above zero")
    return float(value)


def same_value(left: Any, right: Any) -> bool:
    """Equality that does not take True for 1."""
    comparable = type(left) is type(right) or (_is_number(left) and _is_number(right))
    return comparable and bool(left == right)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def short_text(value: Any) -> str:
    """`repr` for a message, cut to 60 characters."""
    try:
        text = repr(value)
    except ValueError:
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
