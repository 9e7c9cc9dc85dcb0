"""An event simulation of the engine's scheduling: a step at a time, the engine's own rules, times from a cost function.

Rules (the scheduler's): one token budget a step; running streams first, a quarter of the budget kept for prompts that
wait; of what is left one half to the oldest prompt, the rest to whoever is nearest to its first token; admission while
the cache holds all known tokens and one page more; the latest arrival is preempted for growth and recomputes. Ranks of
one deployment step together: a step is as long as its slowest rank, plus what all share.

A step costs a few additions per rank, whatever the batch: streams that decode are three sums and a heap of ends; steps
in which everyone only decodes are taken up to a page at once.
Simplified: a stream that is itself the latest is preempted where the engine lets it wait; pages of a cached prefix are
counted for each request that uses it, not once; every prompt finds the same share of it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from coterie.planner.workload import Requests
from coterie.spec.errors import SpecError

MAX_OVERTAKES = 8
WINDOW = 256
"""As in the engine's scheduler: later arrivals that may pass a waiting request; waiting ones looked at in a step."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step in two parts. `local(decode, context, prompt, pairs)`: what a rank does for its own requests:
    streams that decode, tokens of cache they read in all, prompt tokens, (prompt token, earlier token) pairs.
    `shared(decode, prompt)`: what depends on the mean streams and prompt tokens of all ranks: experts, constants."""

    local: Callable[[int, int, int, float], float]
    shared: Callable[[float, float], float]

    def __call__(self, decode: int, context: int, prompt: int = 0, pairs: float = 0.0) -> float:
        """Seconds of a step in which all ranks have the same."""
        return self.local(decode, context, prompt, pairs) + self.shared(decode, prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of one rank, named as the engine's: tokens a step, requests that run, tokens of its cache, tokens a page.
    `ranks` step together. Raises SpecError for what cannot serve."""

    token_budget: int = 8192
    max_running: int = 256
    cache_tokens: int = 1 << 20
    page: int = 64
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "cache_tokens", "page", "ranks"):
            if not 1 <= getattr(self, name) <= 1 << 40:
                raise SpecError(f"{name} must be from 1 to 2**40, not {getattr(self, name)}")
        if self.cache_tokens < self.page:
            raise SpecError(f"the cache holds {self.cache_tokens} tokens, less than a page of {self.page}")


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen. `start` [N]: first computed; `first`, `end` [N]: first and last token, seconds. `steps`: that all
    ranks took together. `busy`: seconds in steps. `in_system`: time integral of unfinished requests, request-seconds.
    `streams`: the same of streams that decode. `peak`: the most cache tokens a rank ever held."""

    start: NDArray[np.float64]
    first: NDArray[np.float64]
    end: NDArray[np.float64]
    steps: int
    busy: float
    in_system: float
    streams: float
    preemptions: int
    peak: int


@dataclass(slots=True)
class _Book:
    """Requests as plain lists (fast to index), and what becomes of them."""

    isl: list[int]
    osl: list[int]
    cached: list[int]
    known: list[int]
    computed: list[int]
    made: list[int]
    overtaken: list[int]
    start: list[float]
    first: list[float]
    end: list[float]


@dataclass(slots=True)
class _Rank:
    """One rank: who waits and runs, in order of arrival. A stream that decodes is in `ends` (last local step, request)
    and counted in `decode`, `context` and `phase` (by when it needs its next page); `ends` may hold stale entries,
    which `last` (request -> last step) tells. `due`: waiting requests that nobody may pass. `least`: the fewest free
    pages ever; `blocked`: with so many free pages or fewer, nobody who waits can be admitted (-1: not known)."""

    book: _Book
    policy: Policy
    free: int
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    phase: list[int] = field(default_factory=list)
    decode: int = 0
    context: int = 0
    step: int = 0
    preemptions: int = 0
    granted: list[tuple[int, int]] = field(default_factory=list)
    due: set[int] = field(default_factory=set)
    least: int = 1 << 60
    blocked: int = -1

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def pages(self, rows: int) -> int:
        return -(-rows // self.policy.page)

    def begin(self, now: float) -> tuple[int, int, int, float]:
        """Decide the next step: (streams, their cached tokens, prompt tokens, pairs)."""
        self.step += 1
        page = self.policy.page
        while (need := self.phase[-self.step % page]) > self.free:
            self._preempt()
        self.free -= need
        prompt, pairs = 0, 0.0
        self.granted.clear()
        if self.prompts or (self.waiting and self._may_admit()):
            budget = self.policy.token_budget
            prompt, pairs = self._grant(max(budget - self.decode, budget // 4, 1), now)
        self.least = min(self.least, self.free)
        return self.decode, self.context, prompt, pairs

    def quiet(self) -> int:
        """Steps ahead in which this rank only decodes, nobody ends and pages suffice; at most a page of them."""
        if self.prompts or self.waiting:
            return 0
        page = self.policy.page
        steps = min(self.ends[0][0] - self.step - 1, page) if self.ends else page
        return steps if steps > 0 and self._growth(steps) <= self.free else 0

    def _growth(self, steps: int) -> int:
        """Pages that streams need in so many steps from the next one on, at most a page of them."""
        page = self.policy.page
        high = -(self.step + 1) % page + 1
        return sum(self.phase[max(high - steps, 0) : high]) + sum(self.phase[page - max(steps - high, 0) :])

    def advance(self, steps: int) -> None:
        """Take so many quiet steps at once."""
        self.free -= self._growth(steps)
        self.step += steps
        self.context += steps * self.decode
        self.least = min(self.least, self.free)

    def add(self, request: int) -> None:
        insort(self.waiting, request)
        self.blocked = -1

    def _may_admit(self) -> bool:
        return self.free > self.blocked and len(self.running) < self.policy.max_running

    def _grant(self, left: int, now: float) -> tuple[int, float]:
        """Share so many tokens among prompts, as the engine does; tokens granted and pairs."""
        grants: dict[int, int] = {}
        candidates = list(self.prompts)
        if self._may_admit():
            candidates += islice(self.waiting, WINDOW)
            candidates.sort()
        share = -(-left // 2) if len(candidates) > 1 else left
        refused: set[int] = set()
        for request in candidates:
            if got := self._chunk(request, share, grants, refused, now):
                left -= got
                break
        else:
            self.blocked = self.free if len(self.running) < self.policy.max_running else self.blocked
        if left and grants:
            known, computed, due = self.book.known, self.book.computed, self.due
            urgent = [(r not in due, known[r] - computed[r] - grants.get(r, 0), r) for r in candidates]
            heapq.heapify(urgent)
            while left and urgent:
                left -= self._chunk(heapq.heappop(urgent)[2], left, grants, refused, now)
        pairs = 0.0
        for request, count in grants.items():
            pairs += count * (self.book.computed[request] + 0.5 * (count + 1))
            self.granted.append((request, count))
        return sum(grants.values()), pairs

    def _chunk(self, request: int, limit: int, grants: dict[int, int], refused: set[int], now: float) -> int:
        book = self.book
        if request in refused:
            return 0
        if request not in self.prompts and not self._admit(request, now):
            refused.add(request)
            return 0
        count = min(limit, book.known[request] - book.computed[request] - grants.get(request, 0))
        if count > 0:
            grants[request] = grants.get(request, 0) + count
        return count

    def _admit(self, request: int, now: float) -> bool:
        """Let a waiting request run if it is its turn and the cache has room for its known tokens and a page more."""
        book, head = self.book, self.waiting[0]
        if len(self.running) >= self.policy.max_running:
            return False
        if request != head and head in self.due:
            return False
        most = self.pages(book.isl[request] + book.osl[request] - 1)
        pages = self.pages(book.known[request])
        if min(pages + 1, most) > self.free:
            return False
        if request != head:
            book.overtaken[head] += 1
            if book.overtaken[head] >= MAX_OVERTAKES:
                self.due.add(head)
        self.free -= pages
        self.waiting.remove(request)
        self.due.discard(request)
        insort(self.running, request)
        insort(self.prompts, request)
        book.computed[request] = book.cached[request]
        if book.start[request] < 0:
            book.start[request] = now
        return True

    def _preempt(self) -> None:
        """The latest arrival gives its pages back and waits again; its tokens are kept and computed anew."""
        request, book = self.running.pop(), self.book
        self.preemptions += 1
        self.due.add(request)
        if request in self.last:
            done = self.last.pop(request) - self.step + 1
            book.made[request] = book.osl[request] - done
            rows = book.isl[request] + book.made[request] - 1
            self._count_stream(rows, -1, self.step - 1)
            self.free += self.pages(rows)
        else:
            self.prompts.remove(request)
            self.free += self.pages(book.known[request])
        book.known[request] = book.isl[request] + book.made[request]
        book.cached[request] = 0
        self.add(request)

    def _count_stream(self, rows: int, sign: int, step: int) -> None:
        """Count a stream that holds so many rows after local step `step` in or out."""
        self.decode += sign
        self.context += sign * rows
        self.phase[(rows - step - 1) % self.policy.page] += sign

    def finish(self, now: float) -> None:
        """End the step at time `now`: streams grow by a token, prompts that are complete sample one."""
        book, step = self.book, self.step
        self.context += self.decode
        while self.ends and self.ends[0][0] <= step:
            when, request = heapq.heappop(self.ends)
            if self.last.get(request) == when:
                del self.last[request]
                book.end[request] = now
                rows = book.isl[request] + book.osl[request] - 1
                self._count_stream(rows, -1, step)
                self._leave(request, rows)
        for request, count in self.granted:
            book.computed[request] += count
            if book.computed[request] == book.known[request]:
                self.prompts.remove(request)
                self._sample(request, now)

    def _sample(self, request: int, now: float) -> None:
        """A computed prompt (or recomputed stream) has its next token: it decodes, or it is done."""
        book = self.book
        if not book.made[request]:
            book.first[request] = now
        book.made[request] += 1
        rows = book.known[request]
        if book.made[request] >= book.osl[request]:
            book.end[request] = now
            self._leave(request, rows)
            return
        self._count_stream(rows, 1, self.step)
        when = self.step + book.osl[request] - book.made[request]
        self.last[request] = when
        heapq.heappush(self.ends, (when, request))

    def _leave(self, request: int, rows: int) -> None:
        self.running.remove(request)
        self.free += self.pages(rows)


def simulate(requests: Requests, policy: Policy, cost: StepTime) -> Run:
    """Run all requests to their ends; each goes to the rank with the fewest unfinished ones.

    A request whose prompt is cached whole has its first token already and joins as a stream (disaggregated decode).
    Raises SpecError if one cannot fit the cache alone.
    """
    count = len(requests)
    largest = int((requests.isl + requests.osl).max()) - 1
    pages = policy.cache_tokens // policy.page
    if -(-largest // policy.page) > pages:
        raise SpecError(f"a request needs {largest} tokens of cache, a rank holds {pages * policy.page}; use more "
                        "devices, a narrower cache, or shorter requests")  # fmt: skip
    isl, osl, cached = (values.tolist() for values in (requests.isl, requests.osl, requests.cached))
    arrived = requests.cached >= requests.isl
    known = (requests.isl + arrived).tolist()
    book = _Book(isl, osl, cached, known, [0] * count, arrived.astype(int).tolist(), [0] * count,
                 [-1.0] * count, [0.0] * count, [0.0] * count)  # fmt: skip
    ranks = [_Rank(book, policy, pages, phase=[0] * policy.page) for _ in range(policy.ranks)]
    totals = _loop(requests.arrival.tolist(), ranks, cost)
    start, first, end = (np.array(values) for values in (book.start, book.first, book.end))
    peak = (pages - min(rank.least for rank in ranks)) * policy.page
    return Run(start, first, end, *totals, sum(rank.preemptions for rank in ranks), peak)


class _Group:
    """Ranks that step together. Those that only decode for a while sleep: they are brought up to date when something
    happens to them, and stand in a step by the slowest of them (`_worst`, read anew at least once a page)."""

    def __init__(self, ranks: list[_Rank], local: Callable[[int, int, int, float], float]) -> None:
        self.ranks, self._local = ranks, local
        self.active: list[_Rank] = []
        self.step = self.left = self.decode = 0
        self._alarms: list[tuple[int, int]] = []
        self._seen: dict[int, int] = {}  # sleeping ranks by place, and the step they are up to date with
        self._worst, self._worst_since = -1, 0

    def add(self, request: int) -> None:
        """Give a request to the rank with the fewest unfinished ones."""
        place = min(range(len(self.ranks)), key=lambda each: self.ranks[each].unfinished)
        rank = self.ranks[place]
        if place in self._seen:
            self._wake(place)
        elif not rank.unfinished:
            self.active.append(rank)
        rank.add(request)
        self.left += 1

    def calm(self) -> int:
        """Steps until the first sleeper wakes, if nobody is awake."""
        return 0 if self.active or not self._alarms else self._alarms[0][0] - self.step

    def slowest(self, ahead: int = 0) -> float:
        """Seconds of the slowest sleeper in a step so many from now."""
        if not self._seen:
            return 0.0
        if self._worst not in self._seen or self.step >= self._worst_since + self.ranks[0].policy.page:
            self._worst = max(self._seen, key=lambda place: self._seconds(place, 0))
            self._worst_since = self.step
        return self._seconds(self._worst, ahead)

    def _seconds(self, place: int, ahead: int) -> float:
        rank = self.ranks[place]
        grown = rank.context + rank.decode * (self.step + ahead - self._seen[place])
        return self._local(rank.decode, grown, 0, 0.0)

    def pass_steps(self, steps: int) -> None:
        """All sleep for so many steps; those whose time has come wake."""
        self.step += steps
        self._ring()

    def end_step(self, now: float) -> None:
        """Finish the step of those awake; who is done or has nothing but streams leaves them."""
        before = sum(rank.unfinished for rank in self.active)
        for rank in self.active:
            rank.finish(now)
        self.left -= before - sum(rank.unfinished for rank in self.active)
        self.step += 1
        awake = []
        for rank in self.active:
            if not rank.unfinished:
                continue
            if (steps := rank.quiet()) > 2:
                self._sleep(self.ranks.index(rank), steps)
            else:
                awake.append(rank)
        self.active = awake
        self._ring()

    def _sleep(self, place: int, steps: int) -> None:
        self._seen[place] = self.step
        self.decode += self.ranks[place].decode
        heapq.heappush(self._alarms, (self.step + steps, place))
        if self._worst in self._seen and self._seconds(place, 0) > self._seconds(self._worst, 0):
            self._worst = place

    def _ring(self) -> None:
        while self._alarms and self._alarms[0][0] <= self.step:
            _, place = heapq.heappop(self._alarms)
            if place in self._seen:
                self._wake(place)

    def _wake(self, place: int) -> None:
        rank = self.ranks[place]
        rank.advance(self.step - self._seen.pop(place))
        self.decode -= rank.decode
        self.active.append(rank)
        self._alarms = [alarm for alarm in self._alarms if alarm[1] != place]
        heapq.heapify(self._alarms)


def _loop(arrival: list[float], ranks: list[_Rank], cost: StepTime) -> tuple[int, float, float, float]:
    """Step until everyone has ended: (steps, busy seconds, request-seconds in the system, stream-seconds)."""
    now, upcoming, count = 0.0, 0, len(arrival)
    busy, in_system, streams = 0.0, 0.0, 0.0
    local, shared = cost.local, cost.shared
    group = _Group(ranks, local)
    while upcoming < count or group.left:
        while upcoming < count and arrival[upcoming] <= now:
            in_system += now - arrival[upcoming]
            group.add(upcoming)
            upcoming += 1
        if not group.left:
            now = arrival[upcoming]
            continue
        left = group.left
        if calm := group.calm():
            decode = group.decode
            common = shared(decode / len(ranks), 0.0)
            first, last = common + group.slowest(), common + group.slowest(calm - 1)
            if upcoming < count and calm * last > arrival[upcoming] - now:
                calm = max(int((arrival[upcoming] - now) / last), 1)
                last = common + group.slowest(calm - 1)
            seconds = calm * 0.5 * (first + last)
            now += seconds
            group.pass_steps(calm)
        else:
            slowest, prompt, decode = group.slowest(), 0, group.decode
            for rank in group.active:
                load = rank.begin(now)
                slowest = max(slowest, local(*load))
                prompt, decode = prompt + load[2], decode + load[0]
            seconds = slowest + shared(decode / len(ranks), prompt / len(ranks))
            now += seconds
            group.end_step(now)
        busy, in_system, streams = busy + seconds, in_system + left * seconds, streams + decode * seconds
    return group.step, busy, in_system, streams
