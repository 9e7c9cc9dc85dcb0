"""From a request's fields to SamplingParams and PromptJobs. null and absent mean the default.

Ranges, the vocabulary and the context's length are checked by the engine's door, once. Here only what the door cannot
know: how many prompts and choices one HTTP request may have, and which default length belongs to which endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from coterie.engine.messages import SamplingParams
from coterie.server.errors import bad_request
from coterie.server.protocol import SamplingFields

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an endpoint makes of its own fields: length, log-probabilities, grammar, tags."""

    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    shown_special_ids: tuple[int, ...] = ()


def sampling_params(request: SamplingFields, wanted: Wanted) -> SamplingParams:
    """The request's sampling values, not yet checked for their ranges."""
    default = SamplingParams()
    stop = request.stop
    return SamplingParams(
        temperature=_or(request.temperature, default.temperature),
        top_p=_or(request.top_p, default.top_p),
        top_k=_or(request.top_k, default.top_k),
        min_p=_or(request.min_p, default.min_p),
        repetition_penalty=_or(request.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, default.frequency_penalty),
        logit_bias=request.logit_bias or {},
        seed=request.seed,
        n=_or(request.n, default.n),
        max_tokens=wanted.max_tokens,
        min_tokens=_or(request.min_tokens, default.min_tokens),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        grammar=wanted.grammar,
        shown_special_ids=wanted.shown_special_ids,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def asked_length(request: SamplingFields) -> int | None:
    """How many tokens were asked for: `max_completion_tokens` wins over `max_tokens`."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def renamed_length(request: SamplingFields, own: str) -> dict[str, str]:
    """What the client calls the engine's max_tokens, by the field it sent; by the route's `own` if it sent none."""
    if request.max_completion_tokens is not None:
        return {"max_tokens": "max_completion_tokens"}
    return {} if request.max_tokens is not None else {"max_tokens": own}


def check_fan_out(num_prompts: int, request: SamplingFields, max_choices: int, capacity: int) -> None:
    """Refuse a request that would become too many sequences: for the server's rule, or ever to fit into the engine."""
    n = request.n or 1
    if num_prompts * n <= min(max_choices, capacity):
        return
    what = f"n = {n}" if num_prompts == 1 else f"{num_prompts} prompts times n = {n}"
    limit = f"the {max_choices} sequences one request may have (the server's --max-choices)"
    if capacity < max_choices:
        limit = f"the {capacity} sequences that may run or wait here together (the server's --max-queued-requests)"
    raise bad_request(f"n: {what} is more than {limit}", param="n")


def truncated(token_ids: list[int], keep: int | None, room: int) -> list[int]:
    """The last `keep` tokens of a prompt; -1 keeps what fits into `room`."""
    if keep is None:
        return token_ids
    if keep == 0:
        raise bad_request("truncate_prompt_tokens: must be at least 1, or -1 for what fits", "truncate_prompt_tokens")
    return token_ids[-(max(1, room) if keep < 0 else keep) :]
