"""The door for sampling parameters and prompts: types, ranges, bounds. What passes here cannot hurt the engine loop.

Not here: the OpenAI field names that the server maps onto SamplingParams, and the size of the cache (Scheduler.add).
Every range check is written as "lo <= x <= hi", which NaN fails. Types are strict: True is no number, "0.5" neither.
Messages say what was asked and what is possible; InvalidRequest.param names the field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coterie.engine.errors import InvalidRequest
from coterie.engine.messages import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""At and below this temperature the most likely token is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLimits:
    """The largest value or length of each field. `max_logit_bias_value` clamps, all others refuse."""

    max_n: int = 128
    max_temperature: float = 2.0
    max_repetition_penalty: float = 10.0
    max_penalty: float = 2.0
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_logit_bias_value: float = 100.0


DEFAULT_LIMITS = ParamLimits()


def validate(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int | None = None,
    limits: ParamLimits = DEFAULT_LIMITS,
    scores_only: bool = False,
) -> SamplingParams:
    """Return `params` in normal form, or raise InvalidRequest naming the first bad field.

    Normal form: biases clamped, seed in [0, 2^64), top_k at most the vocabulary, greedy temperature exactly 0, stops as
    tuples. `vocab_size` is the model's. `scores_only`: the caller wants prompt rows, so `max_tokens` may be 0 (it also
    may with `prompt_logprobs`).
    """
    _check_numbers(params, limits)
    _check_lengths(params, max_model_len, scores_only=scores_only)
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if type(getattr(params, name)) is not bool:
            raise _bad(params, name, "true or false")
    if params.seed is not None:
        _check_int(params, "seed", -(2**63), 2**64 - 1)
    if params.grammar is not None:
        _check_grammar(params)
    return msgspec.structs.replace(
        params,
        temperature=0.0 if params.temperature <= GREEDY_TEMPERATURE else float(params.temperature),
        top_k=min(params.top_k, vocab_size) if params.top_k > 0 else -1,
        logit_bias=_logit_bias(params.logit_bias, vocab_size, limits),
        seed=None if params.seed is None else params.seed % 2**64,
        stop=_stop_strings(params.stop, limits),
        stop_token_ids=_stop_token_ids(params.stop_token_ids, vocab_size, limits),
    )


def validate_prompt(
    prompt_token_ids: Sequence[int], params: SamplingParams, *, vocab_size: int, max_model_len: int
) -> int:
    """Check a prompt against the model and return `max_total_tokens`, its longest possible length with the answer.

    `vocab_size` is the model's (ids that only pad the tokenizer's vocabulary are legal). Without `max_tokens` the cap
    is the room left in the context; a prompt that leaves none is refused, as is one that asks for more than there is.
    """
    length = len(prompt_token_ids)
    if not length:
        raise InvalidRequest("prompt", "the prompt has no tokens; give at least one")
    asked = params.max_tokens
    longest = max_model_len - (asked != 0)
    if length > longest:
        raise InvalidRequest("prompt", _too_long(length, asked, max_model_len))
    check_token_ids("prompt", prompt_token_ids, vocab_size)
    if asked is not None and length + asked > max_model_len:
        raise InvalidRequest(
            "max_tokens",
            f"the context limit is {max_model_len} tokens, the prompt has {length} and max_tokens={asked} was asked"
            f" for; lower max_tokens to at most {max_model_len - length} or leave it out",
        )
    room = max_model_len - length
    if params.min_tokens > room:
        raise InvalidRequest(
            "min_tokens",
            f"the context limit is {max_model_len} tokens, the prompt has {length} and min_tokens={params.min_tokens}"
            f" was asked for; lower it to at most {room}",
        )
    return length + (room if asked is None else asked)


def _too_long(length: int, asked: int | None, max_model_len: int) -> str:
    """What to say of a prompt that leaves no room for even one token."""
    limit = f"the context limit is {max_model_len} tokens, the prompt has {length}"
    if asked is None:
        return (
            f"{limit} and no max_tokens was asked for; shorten the prompt to at most {max_model_len - 1} tokens, as at"
            " least one is left for the answer"
        )
    if asked == 0:
        return f"{limit}; shorten the prompt to at most {max_model_len} tokens"
    room = max_model_len - asked
    remedy = f"at most {room} tokens" if room > 0 else f"at most {max_model_len - 1} tokens and lower max_tokens"
    return f"{limit} and max_tokens={asked} was asked for; shorten the prompt to {remedy}"


def check_token_ids(param: str, token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise InvalidRequest unless every id is an integer in [0, vocab_size)."""
    if set(map(type, token_ids)) <= {int} and 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < vocab_size:
        return
    for position, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequest(
                param,
                f"{param} has {_show(token)} at position {position}; token ids are integers from 0 to {vocab_size - 1}",
            )


def _check_numbers(params: SamplingParams, limits: ParamLimits) -> None:
    _check_float(params, "temperature", 0.0, limits.max_temperature)
    _check_float(params, "top_p", 0.0, 1.0)
    _check_float(params, "min_p", 0.0, 1.0)
    _check_float(params, "presence_penalty", -limits.max_penalty, limits.max_penalty)
    _check_float(params, "frequency_penalty", -limits.max_penalty, limits.max_penalty)
    _check_float(params, "repetition_penalty", 1e-3, limits.max_repetition_penalty)
    _check_int(params, "top_k", -1, 2**63 - 1)
    _check_int(params, "n", 1, limits.max_n)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(params, name, 0, limits.max_logprobs)


def _check_lengths(params: SamplingParams, max_model_len: int | None, *, scores_only: bool) -> None:
    """max_tokens against the context and the prompt is `validate_prompt`'s, which can name all three numbers."""
    if params.max_tokens is not None:
        scores = scores_only or params.prompt_logprobs is not None
        _check_int(params, "max_tokens", 0 if scores else 1, 2**63)
    highest = 2**63 if max_model_len is None else max_model_len
    _check_int(params, "min_tokens", 0, highest if params.max_tokens is None else min(highest, params.max_tokens))


def _check_grammar(params: SamplingParams) -> None:
    """Its text is `engine.grammar_check`'s. A fulfilled grammar allows nothing but the end, which these two forbid."""
    if not isinstance(params.grammar, str):
        raise _bad(params, "grammar", "a text")
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise InvalidRequest(name, f"{name} cannot be combined with a grammar, which says itself where it may end")


def _check_float(params: SamplingParams, name: str, low: float, high: float) -> None:
    value = getattr(params, name)
    if type(value) not in (int, float) or not low <= value <= high:
        raise _bad(params, name, f"a number from {low:g} to {high:g}")


def _check_int(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if type(value) is not int or not low <= value <= high:
        unbounded = high >= 2**62 and not (type(value) is int and value > high)
        raise _bad(params, name, f"an integer of at least {low}" if unbounded else f"an integer from {low} to {high}")


def _bad(params: SamplingParams, name: str, possible: str) -> InvalidRequest:
    return InvalidRequest(name, f"{name} must be {possible}, got {_show(getattr(params, name))}")


def _show(value: object) -> str:
    """A short spelling of a hostile value: long ones are cut, huge integers are not spelled at all."""
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _logit_bias(bias: object, vocab_size: int, limits: ParamLimits) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise InvalidRequest("logit_bias", f"logit_bias must map token ids to biases, got {_show(bias)}")
    if len(bias) > limits.max_logit_bias:
        raise InvalidRequest(
            "logit_bias", f"logit_bias has {len(bias)} entries, at most {limits.max_logit_bias} may be set"
        )
    bound = limits.max_logit_bias_value
    clamped = {}
    for token, amount in bias.items():
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequest(
                "logit_bias",
                f"logit_bias names token {_show(token)}; token ids are integers from 0 to {vocab_size - 1}",
            )
        if type(amount) not in (int, float) or (isinstance(amount, float) and not math.isfinite(amount)):
            raise InvalidRequest(
                "logit_bias", f"logit_bias of token {token} must be a finite number, got {_show(amount)}"
            )
        clamped[token] = float(max(-bound, min(bound, amount)))
    return clamped


def _stop_strings(stop: object, limits: ParamLimits) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)):
        raise InvalidRequest("stop", f"stop must be a string or a list of strings, got {_show(stop)}")
    if len(stop) > limits.max_stop:
        raise InvalidRequest("stop", f"stop has {len(stop)} strings, at most {limits.max_stop} may be given")
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= limits.max_stop_chars:
            raise InvalidRequest(
                "stop", f"a stop string must have 1 to {limits.max_stop_chars} characters, got {_show(text)}"
            )
    return tuple(dict.fromkeys(stop))


def _stop_token_ids(token_ids: object, vocab_size: int, limits: ParamLimits) -> tuple[int, ...]:
    if not isinstance(token_ids, (list, tuple)):
        raise InvalidRequest("stop_token_ids", f"stop_token_ids must be a list of token ids, got {_show(token_ids)}")
    if len(token_ids) > limits.max_stop_token_ids:
        raise InvalidRequest(
            "stop_token_ids",
            f"stop_token_ids has {len(token_ids)} entries, at most {limits.max_stop_token_ids} may be given",
        )
    check_token_ids("stop_token_ids", token_ids, vocab_size)
    return tuple(dict.fromkeys(token_ids))
