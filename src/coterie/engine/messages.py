"""What front end and engine say to each other: plain msgspec values, the same over an in-process queue or a socket.

Front end -> engine: Add, Abort, Drain. Engine -> front end: Output (one per request and step that has news), Stats.
No text crosses: the front end tokenises, detokenises and watches stop strings; the engine knows token ids only.
With several ranks there are besides Wake, Regroup and Leave to each rank, and Regrouped, Fault and Beat from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ServiceClass = Literal["gold", "silver", "bronze"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. Validated once by `engine.sampling_params.validate` before it crosses to the engine.

    temperature <= 1e-5 is greedy; top_k -1 or 0 is off; `seed` None draws one at admission. `logprobs` k returns the
    chosen token's log-probability and the k best; `prompt_logprobs` likewise for the prompt. `stop` strings live in the
    front end. `max_tokens` None means the room left in the context. `grammar`: a text that the answer must follow, in
    llguidance's Lark dialect or its JSON form (`engine.grammar_text` writes them); the end token is allowed only where
    the grammar is fulfilled, and `max_tokens` may cut it anywhere. `shown_special_ids`: special tokens that are text
    for the front end in spite of `skip_special_tokens`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    shown_special_ids: tuple[int, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and its rank among all (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Start a sequence. n > 1 is n Adds whose `sample_index` differs; randomness is a function of (seed, sample_index,
    token index). `want_logits` returns the logits row of every prompt position (Python API, tests). `service_class`
    None: the engine has one class only. `resumed`: tokens that another rank, now lost, had generated already; the
    sequence goes on behind them."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float = 0.0
    sample_index: int = 0
    want_logits: bool = False
    service_class: ServiceClass | None = None
    resumed: list[int] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a sequence now; idempotent, unknown ids are ignored."""

    request_id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Accept nothing new; stop the loop when the last sequence has finished."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """To every rank after each Add or Drain to any of them: there may be work. Ranks sleep only together, once none has
    work and all have seen the same `number`."""

    number: int


class Regroup(msgspec.Struct, frozen=True, tag="regroup"):
    """Make generation `generation` of the group: ranks `members` (their numbers, ascending), which meet at the store.

    `slots`: experts of all members' slots, int32 little-endian [layers, slots]; what a rank lacks of its own it loads.
    `gently`: nobody is lost, so leave the present generation together, at the end of a step. `wake`: as in Wake.
    """

    generation: int
    members: list[int]
    nodes: list[int]
    slots: bytes
    wake: int
    gently: bool = False


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Leave generation `generation`, which cannot go on, and wait for a Regroup."""

    generation: int


class Output(msgspec.Struct, frozen=True, tag="output"):
    """News of one sequence: the tokens of this step and, at the end, why it ended.

    logprobs: per new token the chosen one first, then the best; prompt_logprobs: per prompt position (None for the
    first), sent once with the first output. logits: float32 rows as bytes [len(prompt), vocab], if asked for.
    prefill_seconds: from the step that first computed this sequence to its first output, which carries it.
    retry_after: the request itself was not at fault, and may be made again after so many seconds.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    logits: bytes | None = None
    prefill_seconds: float | None = None
    retry_after: float | None = None


class ClassStats(msgspec.Struct, frozen=True, array_like=True):
    """One service class: sequences now, tokens computed and sequences evicted by a higher class since the start."""

    name: str
    num_running: int
    num_waiting: int
    prompt_tokens: int
    decode_tokens: int
    evictions: int


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """One of several ranks. `state`: loading, ready (to join), serving or lost."""

    rank: int
    node: int
    state: str
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    generation_tokens: int = 0
    steps: int = 0


class GroupStats(msgspec.Struct, frozen=True):
    """The group of several ranks: its generation and members, what was lost, how long that took.

    detect_seconds, recovery_seconds: of the last fault, from the last sign of life of the lost rank to its being known,
    and from there to serving again. retried, failed: sequences in flight that went on elsewhere, or ended in an error.
    """

    generation: int = 0
    living: int = 0
    faults: int = 0
    detect_seconds: float = 0.0
    recovery_seconds: float = 0.0
    experts_loaded: int = 0
    retried: int = 0
    failed: int = 0
    ranks: tuple[RankStats, ...] = ()


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """The engine's state after a step: gauges now, counters since the start, seconds per stage.

    prefill_rate: prompt tokens per second of late, 0 before any were computed; step_seconds: how long steps with
    prompts took of late. classes: none if the engine has one class only. group: of several ranks. experts_moved: that
    came from other ranks; move_cycles, moves_failed: how often the ranks were through with moving what should move, and
    how often they had to give it up. balancedness: by MoE layer, mean rows of the ranks over the busiest one's in the
    last window between two decisions on moves. hops: by class of hop between ranks, payload bytes that were sent, and
    those that the links could have carried in that time.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_free_blocks: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    stage_seconds: dict[str, float]
    prefill_rate: float = 0.0
    step_seconds: float = 0.0
    classes: tuple[ClassStats, ...] = ()
    group: GroupStats | None = None
    experts_moved: int = 0
    move_cycles: int = 0
    moves_failed: int = 0
    balancedness: dict[int, float] = {}
    hops: dict[str, tuple[int, float]] = {}


class Regrouped(msgspec.Struct, frozen=True, tag="regrouped"):
    """This rank is in a generation, having loaded so many experts for it. `choices`: of the exchange, with reasons."""

    generation: int
    experts_loaded: int = 0
    choices: list[tuple[str, str, str]] = []


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """In this generation this rank's slots hold the experts `slots` of a MoE layer from now on: it took some over."""

    generation: int
    layer: int
    slots: list[int]


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """This rank has fallen out of a generation and waits for the next. `missing`: ranks that did not answer it; `own`:
    something failed here."""

    generation: int
    message: str
    missing: list[int] = []
    own: bool = False


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A rank's process is alive; it has entered `step`. `work`: a number that changes while it computes or loads;
    `waits`: for other ranks or for a message, so that it is not to blame where nothing gets on."""

    step: int = 0
    work: int = 0
    waits: bool = True


ToEngine = Add | Abort | Drain
FromEngine = Output | Stats
ToRank = Add | Abort | Drain | Wake | Regroup | Leave
FromRank = Output | Stats | Regrouped | Moved | Fault | Beat
