"""Tracker: the front end's book of requests, without threads or sockets. Requests go in, `Add`s and `Abort`s come out;
`Output`s go in, text and tokens come out as each request's `news`.

A request of n choices is n sequences "<id>/<i>" for the engine. Randomness: a request without a seed gets one here.
Used by the asyncio front end and by the synchronous `LLM`; whoever calls it keeps it to one thread at a time.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from coterie.engine.admission import Door
from coterie.engine.detokenizer import ChoiceText, ShownText
from coterie.engine.errors import EngineBusy, InvalidRequest
from coterie.engine.messages import Abort, Add, FinishReason, Output, SamplingParams, ServiceClass, Stats
from coterie.engine.output import ChoiceDelta, Completion, PromptInfo, RequestOutput, RequestTimes
from coterie.engine.queue_door import Needs
from coterie.engine.row_times import Run
from coterie.engine.tokenizer import Tokenizer
from coterie.observe.requests import RequestObserver, RequestSummary

News = PromptInfo | ChoiceDelta

_MARK_TOKENS = 64
"""The end of a prompt, by which a refused request is known again."""
_SEVERITY: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


def nobody_waits() -> None:
    """Default of `TrackedRequest.wake`."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request from the door to its end. `news` is what the caller has not taken; `wake` is called when it grows.

    `failure`: the engine is gone, no further news. `logits`: the rows of a request that wanted them.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    rank: int = 0
    choices: list[_Choice] = field(default_factory=list)
    news: deque[News] = field(default_factory=deque)
    wake: Callable[[], None] = nobody_waits
    first_token: float | None = None
    finished: float | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    num_cached_tokens: int = 0
    failure: str | None = None
    logits: bytes | None = None
    early: list[ChoiceDelta] | None = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.finished is not None

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.arrival, self.first_token, self.finished)


@dataclass(slots=True, eq=False)
class _Choice:
    """One sequence of a request."""

    request: TrackedRequest
    index: int
    text: ChoiceText
    run: Run
    num_tokens: int = 0
    last_token: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def sequence_id(self) -> str:
        return f"{self.request.request_id}/{self.index}"


class Tracker:
    """All unfinished requests of one engine."""

    def __init__(self, door: Door, tokenizer: Tokenizer | None, *, seed: int = 0) -> None:
        self.door = door
        self.observer = RequestObserver()
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._requests: dict[str, TrackedRequest] = {}
        self._sequences: dict[str, _Choice] = {}
        self._queue = door.queue_door()
        self._has_classes = door.service.enabled

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine still owes an end."""
        return len(self._sequences)

    @property
    def requests(self) -> list[TrackedRequest]:
        """Unfinished requests, oldest first."""
        return list(self._requests.values())

    def admit(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        want_logits: bool = False,
        service_class: ServiceClass | None = None,
    ) -> tuple[TrackedRequest, list[Add]]:
        """Check a request and book it. Raises `InvalidRequest` or `EngineBusy`; then nothing was changed."""
        params = self.door.check(prompt, params, want_logits=want_logits)
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._requests:
            raise InvalidRequest("request_id", f"request id {request_id!r} is in use; choose another")
        service_class = service_class or self.door.service.default_class
        rank = self._queue.table.rank(service_class)
        now = time.monotonic()
        asked = params.n * self._asked(params, len(prompt))
        mark = hash((params.n, asked, len(prompt), *prompt[-_MARK_TOKENS:]))
        needs = Needs(params.n, len(prompt), asked, mark)
        try:
            self._queue.check(rank, needs, now)
        except EngineBusy:
            if self._has_classes:
                self.observer.refused(service_class)
            raise
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        params = msgspec.structs.replace(params, seed=seed)
        request = TrackedRequest(request_id, prompt, params, now, rank)
        adds = []
        for index, run in enumerate(self._queue.enter(rank, needs)):
            choice = _Choice(request, index, ChoiceText(self._tokenizer, params), run)
            request.choices.append(choice)
            self._sequences[choice.sequence_id] = choice
            one = params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
            adds.append(Add(choice.sequence_id, prompt, one, now, index, want_logits and index == 0, service_class))
        self._requests[request_id] = request
        self.observer.queued(len(prompt))
        return request, adds

    def _asked(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Tokens that a sequence may generate."""
        return self.door.max_model_len - num_prompt_tokens if params.max_tokens is None else params.max_tokens

    def feed(self, output: Output, when: float | None = None) -> Abort | None:
        """Take news of a sequence; returns the Abort that a stop string calls for. News of unknown ids is ignored.

        `when`: the monotonic time at which the engine handed it over; None: now.
        """
        when = time.monotonic() if when is None else when
        choice = self._sequences.get(output.request_id)
        if choice is None:
            return None
        request = choice.request
        if output.prefill_seconds is not None and request.prefill_seconds is None:
            request.prefill_seconds = output.prefill_seconds
            request.queue_seconds = max(0.0, when - request.arrival - output.prefill_seconds)
        if output.token_ids:
            self._note_tokens(choice, len(output.token_ids), when)
        if output.logits is not None:
            request.logits = output.logits
        shown, reason = self._show(choice, output)
        choice.num_tokens += len(shown.token_ids)
        stopped = shown.stop is not None
        if shown.text or shown.token_ids or reason is not None:
            stop_reason = shown.stop if stopped else (output.stop_token_id if reason == "stop" else None)
            error = output.error if reason == "error" else None
            self._tell(
                choice,
                ChoiceDelta(
                    choice.index,
                    shown.text,
                    shown.token_ids,
                    shown.logprobs,
                    reason,
                    stop_reason,
                    error,
                    output.retry_after,
                ),
            )
        if choice.index == 0 and request.early is not None:
            self._open(request, PromptInfo(output.num_cached_tokens, output.prompt_logprobs))
        if reason is not None:
            self._end(choice, reason, when)
        request.wake()
        return Abort(output.request_id) if stopped and output.finish_reason is None else None

    @staticmethod
    def _show(choice: _Choice, output: Output) -> tuple[ShownText, FinishReason | None]:
        if output.finish_reason is None:
            shown = choice.text.push(output.token_ids, output.logprobs)
        else:
            by_token = output.stop_token_id is not None
            shown = choice.text.finish(output.token_ids, output.logprobs, by_token=by_token)
        return shown, "stop" if shown.stop is not None else output.finish_reason

    def _note_tokens(self, choice: _Choice, count: int, now: float) -> None:
        request = choice.request
        if request.first_token is None:
            request.first_token = now
            self.observer.first_token(now - request.arrival)
        if not choice.run.tokens:
            self._queue.begin(request.rank, choice.run, now)
        choice.run.tokens += count
        if choice.last_token is not None:
            self.observer.token_gap(now - choice.last_token, count)
        choice.last_token = now

    @staticmethod
    def _tell(choice: _Choice, delta: ChoiceDelta) -> None:
        """Deltas wait until the first choice's first news has given the PromptInfo."""
        request = choice.request
        if request.early is None:
            request.news.append(delta)
        else:
            request.early.append(delta)

    def _open(self, request: TrackedRequest, info: PromptInfo) -> None:
        request.num_cached_tokens = info.num_cached_tokens
        self._queue.opened(request.rank, len(request.prompt_token_ids), info.num_cached_tokens, request.prefill_seconds)
        request.news.append(info)
        request.news.extend(request.early or ())
        request.early = None

    def note_pace(self, stats: Stats) -> None:
        """Take the engine's measured rates, on which refusals and their times rest."""
        self._queue.note_stats(stats)

    def _end(self, choice: _Choice, reason: FinishReason, when: float) -> None:
        choice.finish_reason = reason
        del self._sequences[choice.sequence_id]
        request = choice.request
        self._queue.end(request.rank, choice.run, when, by_itself=reason == "stop")
        if all(other.finish_reason is not None for other in request.choices):
            if request.early is not None:
                self._open(request, PromptInfo())
            self._close(request, when)

    def _close(self, request: TrackedRequest, when: float) -> None:
        request.finished = when
        del self._requests[request.request_id]
        seconds = request.finished - request.arrival
        reasons = [choice.finish_reason or "abort" for choice in request.choices]
        reason: Literal["stop", "length", "abort", "error"] = max(reasons, key=_SEVERITY.index)
        self.observer.finished(
            RequestSummary(
                reason=reason,
                num_choices=len(request.choices),
                prompt_tokens=len(request.prompt_token_ids),
                cached_tokens=request.num_cached_tokens,
                completion_tokens=sum(choice.num_tokens for choice in request.choices),
                seconds=seconds,
                first_token=None if request.first_token is None else request.first_token - request.arrival,
                queue=request.queue_seconds,
                prefill=request.prefill_seconds,
                service_class=self._queue.table.names[request.rank] if self._has_classes else None,
                deadline=self._queue.table.slo_seconds[request.rank],
            )
        )

    def cancel(self, request: TrackedRequest) -> list[Abort]:
        """The caller is gone: one Abort for each sequence that still runs, none for a finished request."""
        aborts = []
        for choice in request.choices:
            if choice.finish_reason is None:
                aborts.append(Abort(choice.sequence_id))
                self._tell(choice, ChoiceDelta(choice.index, "", finish_reason="abort"))
                self._end(choice, "abort", time.monotonic())
        if aborts:
            request.wake()
        return aborts

    def fail_all(self, reason: str) -> None:
        """The engine is gone: every unfinished request ends with `failure`."""
        for request in self.requests:
            request.failure = reason
            for choice in request.choices:
                if choice.finish_reason is None:
                    self._end(choice, "error", time.monotonic())
            request.wake()


def collect(request: TrackedRequest, news: Iterable[News], prompt: str | None = None) -> RequestOutput:
    """A finished request's news as one RequestOutput."""
    with_logprobs = request.params.logprobs is not None
    choices = [Completion(index, logprobs=[] if with_logprobs else None) for index in range(request.params.n)]
    output = RequestOutput(request.request_id, prompt, request.prompt_token_ids, choices, times=request.times)
    for one in news:
        if isinstance(one, PromptInfo):
            output.num_cached_tokens, output.prompt_logprobs = one.num_cached_tokens, one.prompt_logprobs
            continue
        choice = choices[one.index]
        choice.text += one.text
        choice.token_ids.extend(one.token_ids)
        if choice.logprobs is not None and one.logprobs is not None:
            choice.logprobs.extend(list(entry) for entry in one.logprobs)
        if one.finish_reason is not None:
            choice.finish_reason, choice.stop_reason, choice.error = one.finish_reason, one.stop_reason, one.error
    return output
