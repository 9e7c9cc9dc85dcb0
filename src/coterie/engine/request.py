"""Request: one running sequence inside the engine, and the frozen Schedule that one step executes.

States: WAITING (in the queue; nothing allocated) -> RUNNING (owns blocks) -> FINISHED. Preemption takes RUNNING back to
WAITING with its tokens kept and its blocks given up (recompute). Only the scheduler changes a Request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from coterie.cache.block_pool import BlockKey
from coterie.engine.messages import FinishReason, SamplingParams


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """`token_ids` is prompt + generated; `num_computed_tokens` of them have cache rows. A request that has computed all
    its tokens but the last is decoding: no phase is stored. `num_cached_tokens` came from the prefix cache at the first
    admission.

    `rank`: of its service class, 0 is the highest (`engine/classes.py`).

    The scheduler's own: `order` of arrival, `page_keys` (keys of its first full pages), `num_scheduled_tokens` (of the
    step in flight), `num_prompt_rows` (prompt positions whose logits were handed out), `last_turn` (rises
    with each grant of tokens to anyone), `num_overtakes` (later arrivals admitted before it), `num_preemptions`,
    `num_evictions` (those of them that a higher class caused).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    arrival_time: float = 0.0
    sample_index: int = 0
    seed: int = 0
    want_logits: bool = False
    rank: int = 0
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    order: int = -1
    page_keys: list[BlockKey] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    num_prompt_rows: int = 0
    last_turn: int = -1
    num_overtakes: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_cache_rows(self) -> int:
        """Rows of cache it can ever fill: the last generated token is never computed."""
        return max(len(self.prompt_token_ids), self.max_total_tokens - 1)

    @property
    def generates(self) -> bool:
        """False for a request that only wants its prompt scored (`max_tokens` 0)."""
        return self.max_total_tokens > len(self.prompt_token_ids)

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether every prompt position's logits are wanted: such a request never reuses cached prompt pages."""
        return self.want_logits or self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute `num_tokens` tokens of `request` from position `start` on. `samples`: the last row gives a token."""

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def logit_positions(self) -> range:
        """Positions whose logits this step must give, in row order. Valid until the scheduler's `update`.

        Prompt rows are asked for once: a recompute after preemption does not deliver them again.
        """
        request = self.request
        first = self.end - 1 if self.samples else self.end
        if request.needs_prompt_rows and request.num_prompt_rows < request.num_prompt_tokens:
            first = min(first, max(self.start, request.num_prompt_rows))
        return range(min(first, self.end), self.end)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work, in execution order, and who lost their blocks to make it possible."""

    entries: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)
