"""The door: every hostile value gets an InvalidRequest that names its field, every legal edge passes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from coterie.engine.errors import InvalidRequest
from coterie.engine.messages import SamplingParams
from coterie.engine.sampling_params import (
    ParamLimits,
    check_token_ids,
    validate,
    validate_prompt,
)

VOCAB = 100


def checked(**fields: Any) -> SamplingParams:
    return validate(SamplingParams(**fields), vocab_size=VOCAB, max_model_len=128)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (math.nan, math.inf, -math.inf, -1, -1e-9, 2.1, "0.5", True, None, 10**400)),
        *(("top_p", v) for v in (math.nan, -0.1, 1.0001, math.inf, "1", False)),
        *(("top_k", v) for v in (-2, 1.0, math.nan, "5", True, None, 2**63)),
        *(("min_p", v) for v in (math.nan, -0.1, 1.1, "0")),
        *(("repetition_penalty", v) for v in (math.nan, 0, -1, math.inf, 10.5, "1", True)),
        *(("presence_penalty", v) for v in (math.nan, -2.1, 2.1, math.inf, "0")),
        *(("frequency_penalty", v) for v in (math.nan, -2.1, 2.1, -math.inf, None)),
        *(("n", v) for v in (0, -1, 129, 1_000_000, 1.0, True, None)),
        *(("max_tokens", v) for v in (0, -1, 1.5, "5", True, math.nan, 10**400)),
        *(("min_tokens", v) for v in (-1, 17, 2**63, 1.5, True, None)),
        *(("seed", v) for v in (1.0, "7", True, 2**64, -(2**63) - 1)),
        *(("logprobs", v) for v in (-1, 21, 2.0, True, "3")),
        *(("prompt_logprobs", v) for v in (-1, 21, 10**9, False)),
        *(("stop", v) for v in (5, None, [""], ["a", 5], ["x" * 1025], ["s"] * 17, ["s"] * 100_000, {"a": 1})),
        *(("stop_token_ids", v) for v in (3, [-1], [VOCAB], [True], [1.0], ["3"], [2**32 - 1], list(range(129)))),
        *(("logit_bias", v) for v in (None, [], {-1: 5}, {VOCAB: 5}, {999999: 5}, {"5": 5}, {True: 5}, {1.5: 5})),
        *(("logit_bias", {5: v}) for v in (math.nan, math.inf, -math.inf, "5", None, True)),
        ("logit_bias", dict.fromkeys(range(100_000), 1.0)),
        *(
            (flag, v)
            for flag in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
            for v in (1, "no", None)
        ),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        checked(**{field: value})
    assert error.value.param == field
    assert field in str(error.value) or field.startswith("stop")
    assert len(str(error.value)) < 200, "a hostile value must not fill the log"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-4},
        {"temperature": 2},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"n": 128},
        {"logprobs": 0},
        {"logprobs": 20},
        {"max_tokens": None},
        {"max_tokens": 16, "min_tokens": 16},
        {"stop": ["x" * 1024] * 16},
        {"logit_bias": dict.fromkeys(range(VOCAB), -100)},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"repetition_penalty": 0.5},
    ],
)
def test_legal_edges_pass(fields: dict[str, Any]) -> None:
    params = checked(**fields)
    for name in fields.keys() - {"stop", "logit_bias"}:
        assert getattr(params, name) == fields[name]


@pytest.mark.parametrize(
    ("field", "value", "normal"),
    [
        ("temperature", 1e-9, 0.0),
        ("temperature", 1e-5, 0.0),
        ("top_k", 0, -1),
        ("top_k", -1, -1),
        ("top_k", 1, 1),
        ("top_k", 10**9, VOCAB),
        ("seed", -1, 2**64 - 1),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", 0, 0),
        ("logit_bias", {3: 1e30, 4: -(10**400), 5: 7}, {3: 100.0, 4: -100.0, 5: 7.0}),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b", "a"], ("a", "b")),
        ("stop_token_ids", [7, 7, 0], (7, 0)),
    ],
)
def test_the_normal_form(field: str, value: Any, normal: Any) -> None:
    params = checked(**{field: value})
    assert getattr(params, field) == normal
    assert validate(params, vocab_size=VOCAB) == params, "normal form is a fixed point"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_limits_can_be_set() -> None:
    limits = ParamLimits(max_n=2, max_temperature=5.0)
    assert validate(SamplingParams(temperature=4.0), vocab_size=VOCAB, limits=limits).temperature == 4.0
    with pytest.raises(InvalidRequest, match="from 1 to 2, got 3"):
        validate(SamplingParams(n=3), vocab_size=VOCAB, limits=limits)


def test_no_tokens_only_for_scores() -> None:
    params = SamplingParams(max_tokens=0)
    assert validate(params, vocab_size=VOCAB, scores_only=True).max_tokens == 0
    with pytest.raises(InvalidRequest, match="at least 1"):
        validate(params, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("length", "max_tokens", "total"),
    [(1, None, 128), (127, None, 128), (127, 1, 128), (100, 28, 128), (100, 5, 105), (128, 0, 128), (5, 0, 5)],
)
def test_room_for_the_answer(length: int, max_tokens: int | None, total: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    assert validate_prompt([1] * length, params, vocab_size=VOCAB, max_model_len=128) == total


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [
        (128, 1, "prompt"),
        (128, None, "prompt"),
        (129, 1, "prompt"),
        (129, 0, "prompt"),
        (100_000, 16, "prompt"),
        (127, 2, "max_tokens"),
        (5, 10**6, "max_tokens"),
        (5, 2**63, "max_tokens"),
    ],
)
def test_too_long_names_all_three_numbers(length: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        params = SamplingParams(max_tokens=max_tokens)
        validate_prompt([1] * length, params, vocab_size=VOCAB, max_model_len=128)
    assert error.value.param == param
    for number in (128, length, *([max_tokens] if max_tokens else [])):
        assert str(number) in str(error.value)


def test_too_long_says_what_would_fit() -> None:
    """With the length that was asked for; a prompt that is only scored asks for none, and is told of none."""
    for max_tokens, longest in ((None, 127), (1, 127), (28, 100), (127, 1), (0, 128)):
        params = SamplingParams(max_tokens=max_tokens)
        with pytest.raises(InvalidRequest, match=f"at most {longest} tokens"):
            validate_prompt([1] * 129, params, vocab_size=VOCAB, max_model_len=128)
        validate_prompt([1] * longest, params, vocab_size=VOCAB, max_model_len=128)
    with pytest.raises(InvalidRequest, match="at most 127 tokens and lower max_tokens"):
        validate_prompt([1] * 129, SamplingParams(max_tokens=128), vocab_size=VOCAB, max_model_len=128)
    with pytest.raises(InvalidRequest, match=r"^the context limit is 128 tokens, the prompt has 129; shorten"):
        validate_prompt([1] * 129, SamplingParams(max_tokens=0), vocab_size=VOCAB, max_model_len=128)


def test_an_integer_past_the_upper_end_is_told_of_it() -> None:
    with pytest.raises(InvalidRequest, match=f"from {-(2**63)} to {2**64 - 1}, got {10**20}"):
        checked(seed=10**20)
    with pytest.raises(InvalidRequest, match="top_k must be an integer of at least -1, got -2"):
        checked(top_k=-2)


def test_min_tokens_must_fit_too() -> None:
    with pytest.raises(InvalidRequest, match="at most 28") as error:
        validate_prompt([1] * 100, SamplingParams(max_tokens=None, min_tokens=29), vocab_size=VOCAB, max_model_len=128)
    assert error.value.param == "min_tokens"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**32 - 1, 10**400, True, 1.5, 1.0, "3", None, [1]])
def test_a_prompt_holds_token_ids_only(token: Any) -> None:
    with pytest.raises(InvalidRequest, match="at position 2") as error:
        validate_prompt([1, 2, token, 3], SamplingParams(), vocab_size=VOCAB, max_model_len=128)
    assert error.value.param == "prompt"


def test_an_empty_prompt_is_refused_and_the_last_id_of_a_padded_vocabulary_is_not() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        validate_prompt([], SamplingParams(), vocab_size=VOCAB, max_model_len=128)
    validate_prompt([0, VOCAB - 1], SamplingParams(), vocab_size=VOCAB, max_model_len=128)
    check_token_ids("prompt", [], VOCAB)
