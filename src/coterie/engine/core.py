"""EngineCore: one step after another, from a schedule to outputs. No threads, no text; a clock only to measure.

A step: schedule -> make_batch (`plan`) -> runner.run -> sample -> scheduler.update -> outputs (`execute`). Whatever
fails inside a step ends the request it belongs to with an error Output, never the engine: if a batch raises, its step
is not recorded and its requests are suspects, each of which gets a step of its own; who raises alone is given up. So
every step has one forward, whatever happens, and several ranks stay in lock-step.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engine.batch import logit_owners, make_batch
from coterie.engine.errors import Desynchronised
from coterie.engine.grammar import Grammars, GrammarThread
from coterie.engine.messages import Add, ClassStats, Output, Stats, TokenLogprob
from coterie.engine.pace import Pace
from coterie.engine.prompt_rows import PromptRows
from coterie.engine.request import Request, Schedule, ScheduledRequest
from coterie.engine.runner import ModelRunner
from coterie.engine.sampler import Sampler
from coterie.engine.scheduler import Progress, Scheduler
from coterie.kernels.batch import ForwardBatch
from coterie.spec.errors import CoterieError

Owned = list[tuple[ScheduledRequest, NDArray[np.float32]]]
"""Logits rows by the entry they belong to."""

GRAMMAR_PATIENCE = 0.01
"""Seconds that a step without other work waits for a grammar."""
_log = logging.getLogger(__name__)


class SampledToken(NamedTuple):
    """What a request's last row gave."""

    token_id: int
    logprobs: list[TokenLogprob] | None


class Plan(NamedTuple):
    """A step that was decided and not yet computed. `began`: when, on the monotonic clock."""

    schedule: Schedule
    batch: ForwardBatch
    began: float

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens


class EngineCore:
    """Owned by one thread. `max_model_len` bounds prompt plus answer; validation was done at the front end's door.
    `grammars`: None for a model without a tokenizer."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler, self.runner, self.sampler = scheduler, runner, sampler
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._page_size = scheduler.limits.page_size
        self._grammars = None if grammars is None else GrammarThread(grammars)
        self._timer = runner.timer
        self._prompt_rows: dict[str, PromptRows] = {}
        self._started: dict[str, float] = {}  # when a sequence that has said nothing yet was first computed
        self._news: list[Output] = []
        self._suspects: set[str] = set()  # of a step that failed; each runs alone once
        self._pace = Pace()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._news) or bool(self._grammars)

    def add(self, message: Add) -> None:
        """Queue a sequence. One that cannot run here ends with an error Output of the next step."""
        params, length = message.params, len(message.prompt_token_ids)
        longest = self.max_model_len if params.max_tokens is None else length + params.max_tokens
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=tuple(message.prompt_token_ids),
            params=params,
            max_total_tokens=max(length, min(longest, self.max_model_len)),
            arrival_time=message.arrival_time,
            sample_index=message.sample_index,
            seed=params.seed or 0,
            want_logits=message.want_logits,
            rank=self.scheduler.classes.rank(message.service_class),
            token_ids=[*message.prompt_token_ids, *message.resumed],
        )
        if params.grammar is None:
            self._queue(request)
        elif self._grammars is not None:
            self._grammars.add(request)
        else:
            self._refuse(request, "a grammar needs a tokenizer and this model has none")

    def _queue(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except CoterieError as error:
            self._refuse(request, str(error))
            return
        if request.needs_prompt_rows:
            self._prompt_rows[request.request_id] = PromptRows(request, self.vocab_size)

    def abort(self, request_id: str) -> None:
        """End a sequence; its blocks are free at once. Unknown and finished ids are ignored."""
        request = self.scheduler.abort(request_id)
        if request is None and self._grammars is not None:
            request = self._grammars.drop(request_id)
        if request is not None:
            self._end(request, Output(request_id, [], finish_reason="abort"))

    def abort_all(self) -> None:
        """End every sequence."""
        waiting = [] if self._grammars is None else self._grammars.requests
        for request in (*self.scheduler.requests(), *waiting):
            self.abort(request.request_id)

    def step(self) -> list[Output]:
        """Run one step and return what is new, failures and aborts included."""
        plan = self.plan()
        if plan.num_tokens:
            self.execute(plan)
        return self.take_news()

    def plan(self, *, patient: bool = True) -> Plan:
        """Decide the next step, of no tokens if there is nothing to compute; one that is not executed is forgotten.

        `patient`: wait a moment for a grammar if there is nothing else to do.
        """
        self._timer.start()
        if self._grammars:
            self._take_compiled(self._grammars, patient=patient)
        began, schedule = time.monotonic(), Schedule(())
        if self.scheduler.has_work:
            schedule = self._without_suspects(self.scheduler.schedule(began))
            self._pace.begin(schedule)
            self._note_starts(schedule)
        try:
            batch = make_batch(schedule, self._page_size)
        except Exception as error:
            self._suspect(schedule, error)
            schedule = Schedule(())
            batch = make_batch(schedule, self._page_size)
        self._timer.lap("other")
        return Plan(schedule, batch, began)

    def execute(self, plan: Plan, micro_batches: int = 1) -> None:
        """Compute a plan, of no tokens too, with one forward.

        Raises Desynchronised if other ranks wait for this one in vain; then nothing was recorded.
        """
        schedule = plan.schedule
        try:
            logits = self.runner.run(plan.batch, micro_batches=micro_batches)
        except Desynchronised as fault:
            if fault.own:
                self._suspect(schedule, fault)
            raise
        except Exception as error:
            self._suspect(schedule, error)
            return
        self._suspects.difference_update(entry.request.request_id for entry in schedule.entries)
        rows = self._gather_prompt_rows([(entry, logits[rows]) for entry, rows in logit_owners(schedule)])
        sampled = self._sample(rows)
        self._timer.lap("sample")
        tokens = {request_id: [token.token_id] for request_id, token in sampled.items()}
        for progress in self.scheduler.update(schedule, tokens):
            self._report(progress, sampled.get(progress.request.request_id))
        self._pace.end(time.monotonic() - plan.began)

    def take_news(self) -> list[Output]:
        """What is new since the last call."""
        news, self._news = self._news, []
        return news

    def stats(self) -> Stats:
        """Gauges of now, counters since the start."""
        counters, pool = self.scheduler.counters, self.scheduler.pool
        return Stats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + (0 if self._grammars is None else len(self._grammars)),
            kv_usage=pool.usage,
            num_free_blocks=pool.num_free,
            num_preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            steps=counters.steps,
            stage_seconds=self._timer.seconds(),
            prefill_rate=self._pace.prefill_rate,
            step_seconds=self._pace.step_seconds,
            classes=self._class_stats(),
        )

    def _class_stats(self) -> tuple[ClassStats, ...]:
        scheduler = self.scheduler
        if len(scheduler.classes) == 1:
            return ()
        return tuple(
            ClassStats(name, *scheduler.num_of_class(rank), count.prompt_tokens, count.decode_tokens, count.evictions)
            for rank, (name, count) in enumerate(zip(scheduler.classes.names, scheduler.shares.counters, strict=True))
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, requests or kept rows are not where they should be."""
        self.scheduler.check_integrity()
        known = {request.request_id for request in self.scheduler.requests()}
        assert self._prompt_rows.keys() <= known, "prompt rows outlived their request"
        assert self._started.keys() <= known, "a start outlived its request"

    # The parts of a step

    def _take_compiled(self, grammars: GrammarThread, *, patient: bool) -> None:
        """Queue the requests whose grammar has become ready; whatever is wrong with one ends its request."""
        busy = self.scheduler.has_work or bool(self._news) or not patient
        for ready in grammars.take(patience=0.0 if busy else GRAMMAR_PATIENCE):
            if ready.matcher is None:
                self._refuse(ready.request, ready.error or "the grammar cannot be used")
            else:
                self.sampler.constrain(ready.request, ready.matcher)
                self._queue(ready.request)

    def _note_starts(self, schedule: Schedule) -> None:
        """Remember when sequences without output were first computed; a preemption does not start them again."""
        now = time.monotonic()
        for entry in schedule.entries:
            if entry.request.num_output_tokens == 0:
                self._started.setdefault(entry.request.request_id, now)

    def _without_suspects(self, schedule: Schedule) -> Schedule:
        """A schedule, or while there are suspects one of them alone."""
        self._suspects = {name for name in self._suspects if self.scheduler.get(name) is not None}
        for entry in schedule.entries:
            if entry.request.request_id in self._suspects:
                return Schedule((entry,), schedule.preempted)
        return schedule

    def _suspect(self, schedule: Schedule, error: Exception) -> None:
        """A step failed: end its request, or find out next which of several it was."""
        _log.error("a step of %d requests failed", len(schedule.entries), exc_info=error)
        if len(schedule.entries) == 1:
            self._fail(schedule.entries[0].request, error)
        else:
            self._suspects = {entry.request.request_id for entry in schedule.entries}

    def _gather_prompt_rows(self, rows: Owned) -> Owned:
        """File the rows that requests wanted of their prompts; returns what is left to sample."""
        left: Owned = []
        for entry, values in rows:
            gathered = self._prompt_rows.get(entry.request.request_id)
            try:
                if gathered is not None:
                    gathered.add(entry.logit_positions.start, values)
            except Exception as error:
                self._fail(entry.request, error)
            else:
                left.append((entry, values))
        return left

    def _sample(self, rows: Owned) -> dict[str, SampledToken]:
        """One token for each entry that samples, by request id. A bad row ends its request and no other."""
        last = [(entry.request, values[-1:]) for entry, values in rows if entry.samples]
        if not last:
            return {}
        requests = [request for request, _ in last]
        result = self.sampler.sample(np.concatenate([row for _, row in last]), requests)
        sampled = {}
        for request, token, logprobs, fault in zip(
            requests, result.token_ids, result.logprobs, result.errors, strict=True
        ):
            if fault is None:
                sampled[request.request_id] = SampledToken(token, logprobs)
            else:
                self._fail(request, CoterieError(fault))
        return sampled

    # News

    def _report(self, progress: Progress, token: SampledToken | None) -> None:
        request = progress.request
        prompt = self._prompt_rows.pop(request.request_id, None)
        started = self._started.pop(request.request_id, None)
        output = Output(
            request_id=request.request_id,
            token_ids=list(progress.token_ids),
            finish_reason=progress.finish_reason,
            stop_token_id=progress.stop_token_id,
            logprobs=None if token is None or token.logprobs is None else [token.logprobs],
            prompt_logprobs=None if prompt is None else prompt.logprobs,
            num_cached_tokens=request.num_cached_tokens,
            logits=None if prompt is None else prompt.logits,
            prefill_seconds=None if started is None else time.monotonic() - started,
        )
        self._news.append(output)

    def _refuse(self, request: Request, reason: str) -> None:
        """End a request that the scheduler never had."""
        self._news.append(Output(request.request_id, [], finish_reason="error", error=reason))

    def _fail(self, request: Request, error: Exception) -> None:
        reason = str(error) if isinstance(error, CoterieError) else f"{type(error).__name__}: {error}"
        self.scheduler.fail(request, reason)
        self._end(request, Output(request.request_id, [], finish_reason="error", error=f"the step failed: {reason}"))

    def _end(self, request: Request, last: Output) -> None:
        self._prompt_rows.pop(request.request_id, None)
        self._started.pop(request.request_id, None)
        self._news.append(last)
