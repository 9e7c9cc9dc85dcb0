"""What a caller of the engine sees: text and tokens of each choice, as deltas while they come and whole at the end.

Only values; `engine.detokenizer` makes the text, `engine.frontend` assembles these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from coterie.engine.messages import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """First value of a stream: what is known of the prompt once it is computed. One per request, whatever n is."""

    num_cached_tokens: int = 0
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """News of one choice (0 .. n-1). `text` is safe to show (no split character, no possible start of a stop string).

    `token_ids` and `logprobs` are this delta's: tokens whose text has been shown, so a token comes with the text that
    completes it. Tokens past a stop string are neither shown nor counted. `retry_after`: see `Output`.
    `stop_reason`: the stop string or stop token id that ended it, if one did. One is made for every token, so it is a
    msgspec value, which is made faster than a frozen dataclass.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    retry_after: float | None = None

    @property
    def is_plain_text(self) -> bool:
        """Whether text is all there is to show."""
        return bool(self.text) and self.logprobs is None and self.finish_reason is None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds on the monotonic clock; None until it happened."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class Completion:
    """One finished choice. `error` says what went wrong if `finish_reason` is "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request: prompt, choices, usage and times. `prompt_logprobs[i]` is of prompt token i (first None)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    times: RequestTimes | None = None
