"""Scheduler: who computes how many tokens in the next step. No arrays, no model, no clock of its own.

One rule: every request has tokens without cache rows; a step gives each some of them under one token budget. Decoding
is the case of one missing token. Running streams are served first, so that a step's length bounds their gap. What is
left goes to prompts: one half to the oldest, one half to whoever is nearest to its first token (ties: the oldest). So
the oldest always advances, equals are served in order, and a short prompt does not wait for a long one.

Memory: a request is admitted when the pool can hold all its known tokens and one more page, besides what the running
ones still need; growth beyond that may preempt the latest arrival (its tokens are kept and recomputed). A request that
could not run alone is refused at `add`, so the oldest one can always go on and nothing waits for ever.

Service classes (`engine/classes.py`; one class unless configured): the rules above hold within a class. Each class with
work is promised its share of the step's tokens (not for prompts while it is ahead of a higher one), of the rows
(requests computed in a step) and of the blocks; what is left over goes to the least virtual time. A class that is below
its rows may always admit, so up to twice `max_running` own blocks while no step computes more. Blocks are lent to
whoever asks while the others do not wait, and come back when their borrower ends, or by eviction for a higher class
that has waited half its deadline.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import attrgetter

from coterie.cache.block_pool import BlockKey, BlockPool
from coterie.cache.prefix_cache import PrefixCache
from coterie.engine.classes import MAX_CLASS_OVERTAKES, ONE_CLASS, ClassTable, Shares
from coterie.engine.errors import EngineBusy, InvalidRequest
from coterie.engine.messages import FinishReason
from coterie.engine.request import Request, Schedule, ScheduledRequest, Status
from coterie.engine.room import Room
from coterie.engine.step import Step

MAX_OVERTAKES = 8
"""Later arrivals that may be admitted before a waiting request; then it is the next one, whatever its length."""
ADMISSION_WINDOW = 256
"""Waiting requests looked at in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`token_budget`: tokens a step. `max_running`: requests that own blocks. `max_queued`: requests beyond those."""

    token_budget: int = 512
    max_running: int = 64
    max_queued: int = 1024
    page_size: int = 64
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "max_queued", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, each event counted once however often its request was preempted.

    Prefix queries and hits are tokens looked up and found at first admission; prompt tokens count when the prompt is
    complete; generation tokens when they are accepted.
    """

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one request after a step: its new tokens and, at the end, why it ended."""

    request: Request
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Scheduler:
    """Owns all unfinished requests. Call `schedule`, run it, `update`; `add`, `abort`, `fail` at any time between."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        eos_token_ids: Sequence[int] = (),
        classes: ClassTable = ONE_CLASS,
    ) -> None:
        self.limits, self.pool, self.classes = limits, pool, classes
        self.counters = SchedulerCounters()
        self.shares = Shares(classes, limits.token_budget, limits.max_running)
        self._eos = frozenset(eos_token_ids)
        self._cache = PrefixCache(pool, limits.page_size)
        self._requests: dict[str, Request] = {}
        self._queues: list[list[Request]] = [[] for _ in classes.names]  # who waits; all lists are in order of arrival
        self._running: list[Request] = []
        self._room = Room(pool, limits.page_size, classes, self._running)
        self._claims: dict[BlockKey, Request] = {}  # pages not there yet, and the running request that computes them
        self._next_order = 0
        self._next_turn = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues))

    def num_of_class(self, rank: int) -> tuple[int, int]:
        """How many requests of a class run and wait."""
        return sum(request.rank == rank for request in self._running), len(self._queues[rank])

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    def requests(self) -> list[Request]:
        """All unfinished requests in order of arrival."""
        return sorted(self._requests.values(), key=attrgetter("order"))

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it can never run here, EngineBusy if the queue is full."""
        if request.request_id in self._requests:
            raise InvalidRequest("request_id", f"request id {request.request_id!r} is in use; choose another")
        if not request.prompt_token_ids:
            raise InvalidRequest("prompt", "the prompt has no tokens; give at least one")
        capacity = self.pool.num_blocks * self.limits.page_size
        if self._room.pages(request.max_cache_rows) > self.pool.num_blocks:
            param = "prompt" if request.num_prompt_tokens > capacity else "max_tokens"
            raise InvalidRequest(
                param,
                f"the request needs {request.max_cache_rows} tokens of cache ({request.num_prompt_tokens} of prompt and"
                f" up to {request.max_total_tokens - request.num_prompt_tokens} to generate), the pool has {capacity};"
                " shorten the prompt, lower max_tokens, or start the engine with more kv_cache_tokens",
            )
        if len(self._requests) >= self.limits.max_running + self.limits.max_queued:
            raise EngineBusy(f"{len(self._requests)} requests run or wait, which is the limit; try again later")
        request.order, self._next_order = self._next_order, self._next_order + 1
        if request.rank not in (busy := self._busy()):
            self.shares.begin(request.rank, busy)
        self._requests[request.request_id] = request
        self._queues[request.rank].append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, wherever it is; None if it is unknown or has finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    def fail(self, request: Request, reason: str) -> None:
        """End a request whose step went wrong. Its pages are not trusted: nobody will find them in the prefix cache."""
        if request.status is Status.FINISHED:
            return
        for block in request.block_ids:
            self.pool.forget(block)
        request.error = reason
        self._finish(request, "error")

    def schedule(self, now: float = 0.0) -> Schedule:
        """Decide the next step, allocating the blocks that it writes. Empty only when there is no work.

        `now`: seconds on the clock of the requests' arrival times.
        """
        self._abandon_step()
        self._room.forget()
        self.counters.steps += 1
        step = Step(now, self.limits.token_budget, self.limits.max_running)
        self._share_out(step)
        for request in step.grants:
            request.last_turn, self._next_turn = self._next_turn, self._next_turn + 1
        entries = []
        for request in sorted(step.grants, key=attrgetter("order")):
            count, start = step.grants[request], request.num_computed_tokens
            request.num_scheduled_tokens = count
            samples = request.generates and start + count == request.num_tokens
            entries.append(ScheduledRequest(request, start, count, samples))
        return Schedule(tuple(entries), tuple(step.preempted))

    def update(self, schedule: Schedule, sampled: Mapping[str, Sequence[int]]) -> list[Progress]:
        """Record that `schedule` was executed and `sampled` (per request id, for entries that sample) came out.

        Requests aborted or failed since are passed over. Returns news of those that have any.
        """
        news = []
        for entry in schedule.entries:
            request = entry.request
            if request.status is not Status.RUNNING:
                continue
            assert entry.start == request.num_computed_tokens, "a step was recorded twice"
            self._record_computed(request, entry)
            if entry.samples:
                news.append(self._append(request, sampled[request.request_id]))
            elif not request.generates and request.num_uncomputed_tokens == 0:
                news.append(Progress(request, finish_reason="length"))
            else:
                continue
            if news[-1].finish_reason is not None:
                self._finish(request, news[-1].finish_reason)
        return news

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block and every request is where it should be."""
        self.pool.check_integrity([request.block_ids for request in self._running])
        for queue, status in (*((queue, Status.WAITING) for queue in self._queues), (self._running, Status.RUNNING)):
            assert all(request.status is status for request in queue), f"a request in the {status.name} list is not"
            assert all(a.order < b.order for a, b in pairwise(queue)), "arrival order is broken"
        waiting = [request for queue in self._queues for request in queue]
        members = {id(request) for request in (*waiting, *self._running)}
        assert members == {id(request) for request in self._requests.values()}, "a request is lost or kept too long"
        assert len(waiting) + len(self._running) == len(self._requests), "a request is queued twice"
        lent = 0 if len(self.classes) == 1 else sum(self.shares.rows)
        assert len(self._running) <= self.limits.max_running + lent, "too many requests run"
        for rank, queue in enumerate(self._queues):
            assert all(request.rank == rank for request in queue), "a request waits in another class"
        for request in waiting:
            assert not request.block_ids and not request.num_computed_tokens, "a waiting request owns blocks"
        for request in self._running:
            rows = request.num_computed_tokens + request.num_scheduled_tokens
            assert len(request.block_ids) == self._room.pages(rows), f"{request.request_id} owns too many or few blocks"
            assert rows <= request.num_tokens, f"{request.request_id} computed tokens that it does not have"
        assert all(owner.status is Status.RUNNING for owner in self._claims.values()), "a claim outlived its owner"

    # Giving out tokens

    def _busy(self) -> list[int]:
        """Classes that have requests, by rank."""
        if len(self.classes) == 1:
            return [0]
        running = {request.rank for request in self._running}
        return [rank for rank, queue in enumerate(self._queues) if queue or rank in running]

    def _share_out(self, step: Step) -> None:
        """Give each class with work what it is promised, then what is left to the least virtual times."""
        hungry = busy = self._busy()
        if len(busy) > 1:
            for rank in busy:
                ahead = self.shares.is_ahead(rank, busy)
                self._grant_class(rank, self.shares.tokens[rank], self.shares.rows[rank], step, prompts=not ahead)
        step.lends = True
        while step.tokens and step.rows and hungry:
            turns = self.shares.split(step.tokens, hungry)
            hungry = [rank for rank, tokens in turns if self._grant_class(rank, tokens, step.rows, step)]
        if len(self.classes) > 1:
            self.shares.charge(step.served(len(self.classes)), busy)

    def _grant_class(self, rank: int, tokens: int, rows: int, step: Step, *, prompts: bool = True) -> bool:
        """Give a class up to so many tokens and rows; whether it used all the tokens and might take more."""
        step.begin_turn(rank, tokens, rows)
        self._grant_decodes(step, keep=self._prompt_floor(step) if prompts else 0)
        if prompts:
            self._grant_prompts(step)
            self._grant_decodes(step, keep=0)
        return not step.tokens_left

    def _prompt_floor(self, step: Step) -> int:
        """Tokens kept from decode rows while prompts wait; with a tiny budget they take turns."""
        can_admit = self._queues[step.rank] and self._may_admit(step.rank, lends=step.lends)
        if not can_admit and all(r.num_uncomputed_tokens == 1 for r in self._running if r.rank == step.rank):
            return 0
        return max(step.tokens_left // 4, self.counters.steps & 1)

    def _grant_decodes(self, step: Step, *, keep: int) -> None:
        """One token for each running request that lacks only one; who waited longest first if they are too many."""
        rank, grants = step.rank, step.grants
        ready = [r for r in self._running if r.num_uncomputed_tokens == 1 and r.rank == rank and r not in grants]
        if len(ready) > min(step.tokens_left - keep, step.rows_left):
            ready.sort(key=lambda request: (request.last_turn, request.order))
        for request in ready:
            if step.tokens_left <= keep or step.rows_left <= (keep > 0):
                return
            if request.status is Status.RUNNING and self._reserve(request, request.num_tokens, step):
                step.grant(request, 1)

    def _grant_prompts(self, step: Step) -> None:
        """Half of what is left to the oldest prompt, the rest by how little is missing; see the top of the file."""
        prompts = [r for r in self._running if r.num_uncomputed_tokens > 1 and r.rank == step.rank]
        if self._may_admit(step.rank, lends=step.lends):
            prompts += islice(self._queues[step.rank], ADMISSION_WINDOW)
            prompts.sort(key=attrgetter("order"))
        share = -(-step.tokens_left // 2) if len(prompts) > 1 else step.tokens_left
        if not share or not any(self._grant_chunk(request, share, step) for request in prompts):
            return
        grants = step.grants
        prompts.sort(key=lambda r: (not self._is_due(r), r.num_uncomputed_tokens - grants.get(r, 0), r.order))
        for request in prompts:
            if not step.tokens_left:
                return
            self._grant_chunk(request, step.tokens_left, step)

    def _grant_chunk(self, request: Request, limit: int, step: Step) -> bool:
        """Give a prompt up to `limit` more tokens, admitting it if it waits; False if it gets none."""
        if request in step.preempted or not (step.rows_left or request in step.grants):
            return False
        if request.status is Status.WAITING and not self._admit(request, step):
            return False
        start = request.num_computed_tokens + step.grants.get(request, 0)
        wanted = min(limit, request.num_tokens - start)
        if wanted < 1 or not self._reserve(request, start + 1, step):
            return False
        rows = (len(request.block_ids) + self._room.for_growth(request)) * self.limits.page_size
        end = min(start + wanted, rows)
        self._reserve(request, end, step)
        step.grant(request, end - start)
        return True

    # Admission, preemption, blocks

    def _is_due(self, request: Request) -> bool:
        """Whether a waiting request may not be overtaken (any more)."""
        waits = request.status is Status.WAITING
        return waits and (request.num_preemptions > 0 or request.num_overtakes >= MAX_OVERTAKES)

    def _may_admit(self, rank: int, *, lends: bool = True) -> bool:
        """Whether another request of a class may own blocks: there is a row to lend, or the class is below its own."""
        if lends and len(self._running) < self.limits.max_running:
            return True
        return len(self.classes) > 1 and self.num_of_class(rank)[0] < self.shares.rows[rank]

    def _admit(self, request: Request, step: Step) -> bool:
        """Move a waiting request to the running ones, on its cached prefix, if it is its turn and there is room."""
        if not self._may_admit(request.rank, lends=step.lends) or request in step.deferred or request in step.refused:
            return False
        queue = self._queues[request.rank]
        head = next(waiting for waiting in queue if waiting not in step.deferred)
        if (request is not head and self._is_due(head)) or self._elder_waits(request):
            return False
        reads_cache = self.limits.enable_prefix_caching and not request.needs_prompt_rows
        blocks = self._cache.match(request.token_ids, request.page_keys) if reads_cache else []
        if reads_cache and self._next_page_is_claimed(request, len(blocks)):
            step.deferred.add(request)
            return False
        if not self._take_room(request, blocks, step):
            step.refused.add(request)
            return False
        if request is not head:
            head.num_overtakes += 1
        self._note_overtaken(request, step)
        self.pool.share(blocks)
        queue.remove(request)
        insort(self._running, request, key=attrgetter("order"))
        request.status, request.block_ids = Status.RUNNING, blocks
        request.num_computed_tokens = len(blocks) * self.limits.page_size
        if request.num_preemptions == 0 and reads_cache:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += request.num_computed_tokens
        self._claim_pages(request)
        return True

    def _heads_elsewhere(self, request: Request) -> list[Request]:
        """First waiting requests of the other classes that arrived before `request`."""
        heads = (queue[0] for rank, queue in enumerate(self._queues) if queue and rank != request.rank)
        return [head for head in heads if head.order < request.order]

    def _elder_waits(self, request: Request) -> bool:
        """Whether another class's request has been passed over so often that nobody may go before it."""
        return any(head.num_overtakes >= MAX_CLASS_OVERTAKES for head in self._heads_elsewhere(request))

    def _note_overtaken(self, request: Request, step: Step) -> None:
        for head in self._heads_elsewhere(request):
            head.num_overtakes += head in step.refused

    def _take_room(self, request: Request, blocks: list[int], step: Step) -> bool:
        """Promise a request the blocks it lacks, evicting lower classes if it is time; False if there are too few."""
        room = self._room
        needed = room.needed(request, blocks)
        claimants = (rank for rank, queue in enumerate(self._queues) if queue and self._may_admit(rank))
        if needed <= room.free - room.owed(request, needed, claimants):
            return room.take(request, needed)
        victims = room.lenders(request, needed - room.free, step.now)
        for victim in victims:
            self._preempt(victim, step, by=request)
        return bool(victims) and room.take(request, room.needed(request, blocks))

    def _reserve(self, request: Request, rows: int, step: Step) -> bool:
        """Let a request own blocks for its first `rows` rows, preempting lower classes and later arrivals if it must.

        False if it is the last itself: it keeps what it has and waits. The oldest of the highest class waits for nobody
        but requests that may not be preempted any more, and those have all they need.
        """
        missing = self._room.pages(rows) - len(request.block_ids)
        while missing > 0 and missing > self._room.for_growth(request):
            victim = self._room.latest_after(request)
            if victim is None:
                return False
            self._preempt(victim, step, by=request)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            assert blocks is not None
            request.block_ids += blocks
        return True

    def _preempt(self, victim: Request, step: Step, by: Request) -> None:
        step.revoke(victim)
        self._room.forget()
        step.preempted.append(victim)
        self._running.remove(victim)
        self._release(victim)
        victim.status, victim.num_computed_tokens = Status.WAITING, 0
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        if victim.rank > by.rank:
            victim.num_evictions += 1
            self.shares.counters[victim.rank].evictions += 1
        insort(self._queues[victim.rank], victim, key=attrgetter("order"))

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        (self._running if request.status is Status.RUNNING else self._queues[request.rank]).remove(request)
        self._release(request)
        del self._requests[request.request_id]
        request.status, request.finish_reason = Status.FINISHED, reason

    def _release(self, request: Request) -> None:
        """Give up blocks and claims."""
        self.pool.free(request.block_ids)
        request.block_ids, request.num_scheduled_tokens = [], 0
        for key in request.page_keys:
            if self._claims.get(key) is request:
                del self._claims[key]

    def _abandon_step(self) -> None:
        """Take back the blocks of a step that was scheduled but never recorded."""
        for request in self._running:
            if request.num_scheduled_tokens:
                kept = self._room.pages(request.num_computed_tokens)
                self.pool.free(request.block_ids[kept:])
                del request.block_ids[kept:]
                request.num_scheduled_tokens = 0

    # Prefix pages

    def _next_page_is_claimed(self, request: Request, num_pages: int) -> bool:
        """Whether the first page that a request misses is being computed by another: waiting a step saves the work.

        Nobody waits for a lower class, which may be slow.
        """
        if num_pages >= self._cache.max_reusable_pages(request.num_tokens):
            return False
        owner = self._claims.get(request.page_keys[num_pages])
        return owner is not None and owner.rank <= request.rank

    def _claim_pages(self, request: Request) -> None:
        if not self.limits.enable_prefix_caching:
            return
        num_pages = request.num_tokens // self.limits.page_size
        self._cache.extend_keys(request.page_keys, request.token_ids, num_pages)
        for key in request.page_keys[len(request.block_ids) : num_pages]:
            self._claims.setdefault(key, request)

    # After the step

    def _record_computed(self, request: Request, entry: ScheduledRequest) -> None:
        end, length = entry.end, request.num_prompt_tokens
        request.num_computed_tokens, request.num_scheduled_tokens = end, 0
        if request.num_prompt_rows < length:
            self.counters.prompt_tokens += length if length <= end else 0
            request.num_prompt_rows = max(request.num_prompt_rows, min(end, length))
        first, last = entry.start // self.limits.page_size, end // self.limits.page_size
        if first == last or not self.limits.enable_prefix_caching:
            return
        self._cache.extend_keys(request.page_keys, request.token_ids, last)
        self._cache.insert(request.page_keys[first:last], request.block_ids[first:last])
        for key in request.page_keys[first:last]:
            if self._claims.get(key) is request:
                del self._claims[key]

    def _append(self, request: Request, tokens: Sequence[int]) -> Progress:
        """Accept sampled tokens up to the one that ends the request."""
        if not tokens:
            raise ValueError(f"no token was sampled for {request.request_id}")
        accepted: list[int] = []
        for token in tokens:
            request.token_ids.append(token)
            accepted.append(token)
            self.counters.generation_tokens += 1
            reason = self._finish_reason(request, token)
            if reason is not None:
                return Progress(request, tuple(accepted), reason, token if reason == "stop" else None)
        return Progress(request, tuple(accepted))

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        params, count = request.params, request.num_output_tokens
        if count >= params.min_tokens and (
            (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids
        ):
            return "stop"
        at_limit = params.max_tokens is not None and count >= params.max_tokens
        return "length" if at_limit or request.num_tokens >= request.max_total_tokens else None
