"""A mock engine for scheduler tests: no model, but a cache memory whose every slot remembers what was written there.

A slot holds a fingerprint of the whole prefix up to its position, as a real cache row depends on it. Each executed
step asserts that every scheduled request finds exactly its own past in its slots. The next token is a function of the
prefix, so a request's output is known in advance whatever happens to it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coterie.cache.block_pool import BlockPool
from coterie.engine.batch import make_batch
from coterie.engine.classes import ONE_CLASS, ClassTable
from coterie.engine.messages import SamplingParams
from coterie.engine.request import Request, Schedule, Status
from coterie.engine.scheduler import Progress, Scheduler, SchedulerLimits

EOS = 1
VOCAB = 50


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    prints, last = [], 17
    for token in token_ids:
        last = (last * 1_000_003 + token + 1) % (2**61 - 1)
        prints.append(last)
    return prints


def next_token(token_ids: Sequence[int]) -> int:
    return fingerprints(token_ids)[-1] // 7 % VOCAB


def expected_output(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < (params.max_tokens or 0):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass
class MockEngine:
    """Scheduler, pool and memory. `computed` counts rows per request; `steps` are the executed schedules; `now` is the
    clock, `cost` the seconds that a step takes. Without `checked` the memory is not kept and the books not checked, for
    long runs about time."""

    limits: SchedulerLimits
    num_blocks: int
    classes: ClassTable = ONE_CLASS
    cost: Callable[[Schedule], float] = lambda schedule: 0.0
    now: float = 0.0
    checked: bool = True
    memory: dict[int, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    first_step: dict[str, int] = field(default_factory=dict)
    token_steps: dict[str, list[int]] = field(default_factory=dict)
    steps: list[Schedule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scheduler = Scheduler(self.limits, self.pool, (EOS,), self.classes)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        params: SamplingParams | None = None,
        service_class: str | None = None,
    ) -> Request:
        params = params or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        rank = self.classes.rank(service_class)
        request = Request(name, tuple(prompt), params, len(prompt) + (params.max_tokens or 0), self.now, rank=rank)
        self.scheduler.add(request)
        return request

    def execute(self, schedule: Schedule) -> None:
        """Write the step's rows, then check that each sequence sees its own past."""
        size = self.limits.page_size
        batch = make_batch(schedule, size)
        assert batch.slot_mapping is not None and batch.block_tables is not None
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two rows of a step write the same slot"
        row = 0
        for entry in schedule.entries:
            prints = fingerprints(entry.request.token_ids[: entry.end])
            for position in range(entry.start, entry.end):
                self.memory[slots[row]] = prints[position]
                row += 1
        for entry, table in zip(schedule.entries, batch.block_tables.tolist(), strict=True):
            prints = fingerprints(entry.request.token_ids[: entry.end])
            seen = [self.memory.get(table[p // size] * size + p % size) for p in range(entry.end)]
            assert seen == prints, f"{entry.request.request_id} reads rows that are not its own"
            name = entry.request.request_id
            self.computed[name] = self.computed.get(name, 0) + entry.num_tokens
            self.first_step.setdefault(name, len(self.steps))

    def step(self) -> list[Progress]:
        schedule = self.scheduler.schedule(self.now)
        self.now += self.cost(schedule)
        assert schedule.num_tokens <= self.limits.token_budget
        assert len(schedule.entries) <= self.limits.max_running, "too many rows in a step"
        assert schedule.entries or not self.scheduler.has_work, "there is work but nothing was scheduled"
        assert not {e.request for e in schedule.entries} & set(schedule.preempted)
        if self.checked:
            self.scheduler.check_integrity()
            self.execute(schedule)
        samples = [entry.request for entry in schedule.entries if entry.samples]
        sampled = {r.request_id: [next_token(r.token_ids) if self.checked else 2] for r in samples}
        news = self.scheduler.update(schedule, sampled)
        if self.checked:
            self.scheduler.check_integrity()
        for progress in news:
            self.token_steps.setdefault(progress.request.request_id, []).append(len(self.steps))
        self.steps.append(schedule)
        return news

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                assert self.pool.num_free == self.num_blocks, "blocks leaked"
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


def finished_well(request: Request) -> bool:
    """Whether a request ended by itself with the tokens it had to have."""
    output = list(request.token_ids[request.num_prompt_tokens :])
    return request.status is Status.FINISHED and output == expected_output(request.prompt_token_ids, request.params)
