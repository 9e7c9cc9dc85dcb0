"""Scheduler: who computes how many tokens in the next step. No arrays, no model, no clock.

One rule: every request has tokens without cache rows; a step gives each some of them under one token budget. Decoding
is the case of one missing token. Running streams are served first, so that a step's length bounds their gap. What is
left goes to prompts: one half to the oldest, one half to whoever is nearest to its first token (ties: the oldest). So
the oldest always advances, equals are served in order, and a short prompt does not wait for a long one.

Memory: a request is admitted when the pool can hold all its known tokens and one more page, besides what the running
ones still need; growth beyond that may preempt the latest arrival (its tokens are kept and recomputed). A request that
could not run alone is refused at `add`, so the oldest one can always go on and nothing waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import attrgetter

from coterie.cache.block_pool import BlockKey, BlockPool
from coterie.cache.prefix_cache import PrefixCache
from coterie.engine.errors import EngineBusy, InvalidRequest
from coterie.engine.messages import FinishReason
from coterie.engine.request import Request, Schedule, ScheduledRequest, Status

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


@dataclass(slots=True)
class _Step:
    """A schedule in the making.

    room: free blocks that no running request has been promised; None when it must be counted again.
    deferred: waiting requests that wait on, for pages that another is computing just now. refused: no room for them.
    """

    tokens_left: int
    room: int | None = None
    grants: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    deferred: set[Request] = field(default_factory=set)
    refused: set[Request] = field(default_factory=set)

    def grant(self, request: Request, count: int) -> None:
        self.grants[request] = self.grants.get(request, 0) + count
        self.tokens_left -= count

    def revoke(self, request: Request) -> None:
        self.tokens_left += self.grants.pop(request, 0)


class Scheduler:
    """Owns all unfinished requests. Call `schedule`, run it, `update`; `add`, `abort`, `fail` at any time between."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, eos_token_ids: Sequence[int] = ()) -> None:
        self.limits, self.pool = limits, pool
        self.counters = SchedulerCounters()
        self._eos = frozenset(eos_token_ids)
        self._cache = PrefixCache(pool, limits.page_size)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both lists are in order of arrival
        self._running: list[Request] = []
        self._claims: dict[BlockKey, Request] = {}  # pages not there yet, and the running request that computes them
        self._next_order = 0
        self._next_turn = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        if self._pages(request.max_cache_rows) > self.pool.num_blocks:
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
        self._requests[request.request_id] = request
        self._waiting.append(request)

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

    def schedule(self) -> Schedule:
        """Decide the next step, allocating the blocks that it writes. Empty only when there is no work."""
        self._abandon_step()
        self.counters.steps += 1
        step = _Step(self.limits.token_budget)
        self._grant_decodes(step, keep=self._prompt_floor())
        self._grant_prompts(step)
        self._grant_decodes(step, keep=0)
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
        for queue, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            assert all(request.status is status for request in queue), f"a request in the {status.name} list is not"
            assert all(a.order < b.order for a, b in pairwise(queue)), "arrival order is broken"
        members = {id(request) for request in (*self._waiting, *self._running)}
        assert members == {id(request) for request in self._requests.values()}, "a request is lost or kept too long"
        assert len(self._waiting) + len(self._running) == len(self._requests), "a request is queued twice"
        assert len(self._running) <= self.limits.max_running, "too many requests run"
        for request in self._waiting:
            assert not request.block_ids and not request.num_computed_tokens, "a waiting request owns blocks"
        for request in self._running:
            rows = request.num_computed_tokens + request.num_scheduled_tokens
            assert len(request.block_ids) == self._pages(rows), f"{request.request_id} owns too many or too few blocks"
            assert rows <= request.num_tokens, f"{request.request_id} computed tokens that it does not have"
        assert all(owner.status is Status.RUNNING for owner in self._claims.values()), "a claim outlived its owner"

    # Giving out tokens

    def _prompt_floor(self) -> int:
        """Tokens kept from decode rows while prompts wait; with a tiny budget they take turns."""
        can_admit = self._waiting and len(self._running) < self.limits.max_running
        if not can_admit and all(request.num_uncomputed_tokens == 1 for request in self._running):
            return 0
        return max(self.limits.token_budget // 4, self.counters.steps & 1)

    def _grant_decodes(self, step: _Step, *, keep: int) -> None:
        """One token for each running request that lacks only one; who waited longest first if they are too many."""
        ready = [r for r in self._running if r.num_uncomputed_tokens == 1 and r not in step.grants]
        if len(ready) > step.tokens_left - keep:
            ready.sort(key=lambda request: (request.last_turn, request.order))
        for request in ready:
            if step.tokens_left <= keep:
                return
            if request.status is Status.RUNNING and self._reserve(request, request.num_tokens, step):
                step.grant(request, 1)

    def _grant_prompts(self, step: _Step) -> None:
        """Half of what is left to the oldest prompt, the rest by how little is missing; see the top of the file."""
        prompts = [request for request in self._running if request.num_uncomputed_tokens > 1]
        if len(self._running) < self.limits.max_running:
            prompts += islice(self._waiting, ADMISSION_WINDOW)
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

    def _grant_chunk(self, request: Request, limit: int, step: _Step) -> bool:
        """Give a prompt up to `limit` more tokens, admitting it if it waits; False if it gets none."""
        if request in step.preempted or (request.status is Status.WAITING and not self._admit(request, step)):
            return False
        start = request.num_computed_tokens + step.grants.get(request, 0)
        wanted = min(limit, request.num_tokens - start)
        if wanted < 1 or not self._reserve(request, start + 1, step):
            return False
        rows = (len(request.block_ids) + self.pool.num_free) * self.limits.page_size
        end = min(start + wanted, rows)
        self._reserve(request, end, step)
        step.grant(request, end - start)
        return True

    # Admission, preemption, blocks

    def _is_due(self, request: Request) -> bool:
        """Whether a waiting request may not be overtaken (any more)."""
        waits = request.status is Status.WAITING
        return waits and (request.num_preemptions > 0 or request.num_overtakes >= MAX_OVERTAKES)

    def _admit(self, request: Request, step: _Step) -> bool:
        """Move a waiting request to the running ones, on its cached prefix, if it is its turn and there is room."""
        if len(self._running) >= self.limits.max_running or request in step.deferred or request in step.refused:
            return False
        head = next(waiting for waiting in self._waiting if waiting not in step.deferred)
        if request is not head and self._is_due(head):
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
        self.pool.share(blocks)
        self._waiting.remove(request)
        insort(self._running, request, key=attrgetter("order"))
        request.status, request.block_ids = Status.RUNNING, blocks
        request.num_computed_tokens = len(blocks) * self.limits.page_size
        if request.num_preemptions == 0 and reads_cache:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += request.num_computed_tokens
        self._claim_pages(request)
        return True

    def _take_room(self, request: Request, blocks: list[int], step: _Step) -> bool:
        """Promise a request the blocks it lacks for its known tokens and one page more; False if there are too few."""
        if step.room is None:
            promised = sum(self._missing_pages(running, len(running.block_ids)) for running in self._running)
            step.room = self.pool.num_free - promised
        unowned = sum(self.pool.ref_count(block) == 0 for block in blocks)
        needed = self._missing_pages(request, len(blocks)) + unowned
        if needed > step.room:
            return False
        step.room -= needed
        return True

    def _missing_pages(self, request: Request, owned: int) -> int:
        wanted = min(self._pages(request.num_tokens) + 1, self._pages(request.max_cache_rows))
        return max(wanted - owned, 0)

    def _reserve(self, request: Request, rows: int, step: _Step) -> bool:
        """Let a request own blocks for its first `rows` rows, preempting later arrivals if it must.

        False if it is the latest itself: it keeps what it has and waits. The oldest is never refused.
        """
        missing = self._pages(rows) - len(request.block_ids)
        while missing > self.pool.num_free:
            victim = self._running[-1]
            if victim is request:
                return False
            self._preempt(victim, step)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            assert blocks is not None
            request.block_ids += blocks
        return True

    def _preempt(self, victim: Request, step: _Step) -> None:
        step.revoke(victim)
        step.room = None
        step.preempted.append(victim)
        self._running.remove(victim)
        self._release(victim)
        victim.status, victim.num_computed_tokens = Status.WAITING, 0
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, victim, key=attrgetter("order"))

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        (self._running if request.status is Status.RUNNING else self._waiting).remove(request)
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
                kept = self._pages(request.num_computed_tokens)
                self.pool.free(request.block_ids[kept:])
                del request.block_ids[kept:]
                request.num_scheduled_tokens = 0

    def _pages(self, rows: int) -> int:
        return -(-rows // self.limits.page_size)

    # Prefix pages

    def _next_page_is_claimed(self, request: Request, num_pages: int) -> bool:
        """Whether the first page that a request misses is being computed by another: waiting a step saves the work."""
        if num_pages >= self._cache.max_reusable_pages(request.num_tokens):
            return False
        return request.page_keys[num_pages] in self._claims

    def _claim_pages(self, request: Request) -> None:
        if not self.limits.enable_prefix_caching:
            return
        num_pages = request.num_tokens // self.limits.page_size
        self._cache.extend_keys(request.page_keys, request.token_ids, num_pages)
        for key in request.page_keys[len(request.block_ids) : num_pages]:
            self._claims.setdefault(key, request)

    # After the step

    def _record_computed(self, request: Request, entry: ScheduledRequest) -> None:
        request.num_computed_tokens, request.num_scheduled_tokens = entry.end, 0
        length = request.num_prompt_tokens
        if request.num_prompt_rows < length <= entry.end:
            self.counters.prompt_tokens += length
        request.num_prompt_rows = max(request.num_prompt_rows, min(entry.end, length))
        if not self.limits.enable_prefix_caching:
            return
        first, last = entry.start // self.limits.page_size, entry.end // self.limits.page_size
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
        params = request.params
        if request.num_output_tokens >= params.min_tokens and (
            (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids
        ):
            return "stop"
        at_limit = params.max_tokens is not None and request.num_output_tokens >= params.max_tokens
        return "length" if at_limit or request.num_tokens >= request.max_total_tokens else None
