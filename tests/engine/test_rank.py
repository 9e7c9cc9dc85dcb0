"""The shipped model on several ranks, which are threads here: one rank's tokens, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from thread_ranks import Meeting, ThreadRank, ThreadTransport

from coterie.comm.transport import TransportError
from coterie.engine.build import EngineInfo, Share, build_engine, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.core import EngineCore
from coterie.engine.errors import Desynchronised
from coterie.engine.group import Group
from coterie.engine.messages import Add, Drain, Moved, Regroup, SamplingParams, Wake
from coterie.engine.overlap_choice import OverlapMode
from coterie.engine.rank import Purpose, Rank, Seat
from coterie.engine.rebalance import RebalancePolicy
from coterie.kernels.api import Prepared
from coterie.kernels.batch import ForwardBatch
from coterie.model.shard import ExpertShard
from coterie.model.shipped import shipped_model_path
from coterie.spec.parallel import ParallelConfig
from coterie.spec.repair import Table, cover, slots_of, with_moved, without
from coterie.spec.tensor_split import UNDIVIDED, TensorSplit

CONFIG = EngineConfig(threads=1, kv_cache_tokens=2048, max_model_len=512, chunked_prefill_size=16, page_size=16)
PROMPTS = [[number * 7 % 4000 + 1 for number in range(start, start + 5 + 9 * start)] for start in range(5)]
TOKENS = 10
SPEC = open_model(shipped_model_path()).spec


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, **values})


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What one rank answers."""
    core, _ = build_engine(shipped_model_path(), CONFIG)
    for index, prompt in enumerate(PROMPTS):
        core.add(Add(f"p{index}", prompt, params()))
    found: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return [found[f"p{index}"] for index in range(len(PROMPTS))]


class Ranks:
    """Loaded ranks in threads, formed into generations."""

    def __init__(
        self,
        size: int,
        redundant: int | None = None,
        rebalance: RebalancePolicy = RebalancePolicy(),  # noqa: B008
        tp: int = 1,
        overlap: OverlapMode = "off",
    ) -> None:
        self.layout = ParallelConfig(ep=size, redundant_experts=redundant, tp=tp)
        self.placement = self.layout.placement(SPEC)
        self.table: Table = self.placement.slot_to_expert
        self.meetings: dict[tuple[int, str], Meeting] = {}
        self.lock = threading.Lock()
        self.ranks: list[Rank] = []
        self.threads: list[ThreadRank] = []
        self.generation = self.wake = 0
        for number in range(size):
            shard = ExpertShard.of(self.placement, SPEC, number)
            seat = Seat(number, "", 0, dict(shard.experts), 1 << 40, rebalance=rebalance, tensor=tp, overlap=overlap)
            core, info = load(shard, seat.split)
            self.ranks.append(Rank(core, info, seat, self.meeter(number)))
            self.threads.append(ThreadRank(core, self.ranks[-1].leave))

    def meeter(self, number: int) -> Any:
        def meet(regroup: Regroup, purpose: Purpose) -> ThreadTransport:
            with self.lock:
                key = (regroup.generation, purpose)
                meeting = self.meetings.setdefault(key, Meeting(len(regroup.members)))
            return ThreadTransport(regroup.members.index(number), meeting)

        return meet

    def note(self, number: int) -> Callable[[Moved], None]:
        """Follow a rank's moves, as the front end does."""

        def note(moved: Moved) -> None:
            with self.lock:
                self.table = with_moved(self.table, len(self.ranks), number, moved.layer, moved.slots)

        return note

    def form(self, members: Sequence[int]) -> list[int]:
        """The next generation; returns how many experts each member loaded."""
        self.generation += 1
        total = len(self.ranks)
        self.table = cover(self.table, total, members, 32)
        slots = np.ascontiguousarray(slots_of(self.table, total, members), "<i4").tobytes()
        message = Regroup(self.generation, list(members), [0] * len(members), slots, self.wake)
        joined: dict[int, tuple[Group, int]] = {}
        threads = [
            threading.Thread(target=lambda m=member: joined.update({m: self.ranks[m].join(message)}))  # type: ignore[misc]
            for member in members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for member in members:
            self.threads[member].loop.rebalancer = self.ranks[member].rebalancer
            self.threads[member].start(joined[member][0])
        return [joined[member][1] for member in members]

    def add(self, rank: int, name: str, prompt: list[int], resumed: Sequence[int] = (), **values: Any) -> None:
        self.threads[rank].inbox.put(Add(name, prompt, params(**values), resumed=list(resumed)))
        self.wake += 1
        for thread in self.threads:
            thread.inbox.put(Wake(self.wake))

    def drain(self, members: Sequence[int]) -> None:
        for member in members:
            self.threads[member].inbox.put(Drain())
            self.threads[member].inbox.put(Wake(self.wake + 1))
        for member in members:
            self.threads[member].join()
            assert self.threads[member].ended is None
            self.threads[member].core.check_integrity()


def load(shard: ExpertShard, split: TensorSplit = UNDIVIDED) -> tuple[EngineCore, EngineInfo]:
    return build_engine(shipped_model_path(), CONFIG, share=Share(shard, 1 << 40, split=split))


@pytest.mark.parametrize(("size", "redundant"), [(2, None), (3, 4), (4, 12)])
def test_concurrent_requests_give_the_tokens_of_one_rank(
    size: int, redundant: int | None, alone: list[list[int]]
) -> None:
    ranks = Ranks(size, redundant)
    assert ranks.form(range(size)) == [0] * size
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % size, f"p{index}", prompt)
    ranks.drain(range(size))
    assert [ranks.threads[index % size].tokens(f"p{index}") for index in range(len(PROMPTS))] == alone


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (1, 4)])
def test_the_ranks_of_a_tensor_group_compute_what_the_first_schedules(dp: int, tp: int, alone: list[list[int]]) -> None:
    """Prompts in chunks beside decode rows; the second generation keeps sequences and caches of the first."""
    ranks = Ranks(dp * tp, tp=tp)
    assert ranks.form(range(dp * tp)) == [0] * (dp * tp)
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % dp * tp, f"p{index}", prompt)
    first = ranks.threads[0]
    while len(first.tokens("p0")) < 3:
        pass
    ranks.ranks[-1].leave()
    for thread in ranks.threads:
        thread.join()
        assert isinstance(thread.ended, Desynchronised)
    ranks.form(range(dp * tp))
    ranks.drain(range(dp * tp))
    assert [ranks.threads[index % dp * tp].tokens(f"p{index}") for index in range(len(PROMPTS))] == alone
    for number, thread in enumerate(ranks.threads):
        assert thread.core.stats().generation_tokens == 0 or number % tp == 0
        assert thread.core.runner.model.spec.layers[0].attention.num_heads == 8 // tp


def test_ranks_of_a_tensor_group_need_caches_of_one_size() -> None:
    ranks = Ranks(2, tp=2)
    ranks.ranks[1].core.scheduler.pool.num_blocks -= 1
    errors: list[Exception] = []
    message = Regroup(1, [0, 1], [0, 0], np.ascontiguousarray(ranks.table, "<i4").tobytes(), 0)

    def join(rank: Rank) -> None:
        try:
            rank.join(message)
        except TransportError as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2 and "ranks differ in the size of their caches (give kv_cache_tokens)" in str(errors[0])


def test_a_lost_ranks_experts_and_requests_go_on_elsewhere(alone: list[list[int]]) -> None:
    """Three ranks with room for one loss; then the sequences of the lost one are resumed behind what they had said."""
    ranks = Ranks(3, 16)
    ranks.form(range(3))
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % 3, f"p{index}", prompt)
    lost = ranks.threads[1]
    while len(lost.tokens("p1")) < 3:
        pass
    ranks.ranks[1].leave()
    for thread in ranks.threads:
        thread.join()
        assert isinstance(thread.ended, Desynchronised) and not thread.ended.own
    ranks.table = without(ranks.table, 3, 1)
    missing = sum((np.bincount(row[row >= 0], minlength=32) == 0).sum() for row in ranks.table)
    loaded = ranks.form([0, 2])
    assert sum(loaded) == missing > 0
    for index in (1, 4):
        assert len(lost.tokens(f"p{index}")) < TOKENS
        ranks.add(2, f"p{index}", PROMPTS[index], lost.tokens(f"p{index}"))
    ranks.drain([0, 2])
    for index in range(len(PROMPTS)):
        said = [thread.tokens(f"p{index}") for thread in ranks.threads]
        assert said[0] + said[1] + said[2] == alone[index], index


def test_one_rank_may_be_all_that_is_left(alone: list[list[int]]) -> None:
    ranks = Ranks(2, 32)
    ranks.form([0, 1])
    ranks.add(1, "p0", PROMPTS[0])
    ranks.drain([0, 1])
    ranks = Ranks(2, 32)
    ranks.table = without(ranks.table, 2, 0)
    assert ranks.form([1]) == [0]
    ranks.add(1, "p3", PROMPTS[3])
    ranks.drain([1])
    assert ranks.threads[1].tokens("p3") == alone[3]


@pytest.mark.parametrize(
    "values", [{"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3, "presence_penalty": 1.0}]
)
def test_a_resumed_sequence_is_the_sequence(values: dict[str, Any]) -> None:
    """Sampling and penalties go on as if nothing had been lost; the budget counts what was said before."""
    core, _ = build_engine(shipped_model_path(), CONFIG)
    core.add(Add("whole", PROMPTS[2], params(max_tokens=20, **values)))
    whole = [token for _ in range(40) for output in core.step() for token in output.token_ids]
    assert len(whole) == 20
    core.add(Add("rest", PROMPTS[2], params(max_tokens=20, **values), resumed=whole[:7]))
    rest = [output for _ in range(40) for output in core.step()]
    assert [token for output in rest for token in output.token_ids] == whole[7:]
    assert rest[-1].finish_reason == "length"


class Fails:
    """Stands in for a method that fails in some calls."""

    def __init__(self, inner: Any, when: Any) -> None:
        self.inner, self.when = inner, when

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.when(*args):
            raise RuntimeError("this batch is cursed")
        return self.inner(*args, **kwargs)


def is_cursed(batch: ForwardBatch) -> bool:
    return 3999 in batch.token_ids.tolist()


def test_a_batch_that_cannot_be_prepared_costs_the_others_nothing(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(2)
    kernels = ranks.threads[0].core.runner.model.runtime.kernels
    monkeypatch.setattr(kernels, "prepare", Fails(kernels.prepare, is_cursed))
    ranks.form([0, 1])
    ranks.add(0, "bad", [3999, 1, 2])
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % 2, f"p{index}", prompt)
    ranks.drain([0, 1])
    assert [ranks.threads[index % 2].tokens(f"p{index}") for index in range(len(PROMPTS))] == alone
    assert "cursed" in (ranks.threads[0].outputs("bad")[-1].error or "")


def test_a_failure_between_the_exchanges_of_a_step_needs_a_new_generation(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that fails finds its culprit by running suspects alone, one generation for each failure."""
    ranks = Ranks(2)
    kernels = ranks.threads[0].core.runner.model.runtime.kernels
    calls: list[ForwardBatch] = []

    def fourth_layer(bound: Any, entry: Any, batch: Prepared, cache: Any) -> bool:
        calls.append(batch.host)
        return is_cursed(batch.host) and sum(one is batch.host for one in calls) == 4

    monkeypatch.setattr(kernels, "attention_block", Fails(kernels.attention_block, fourth_layer))
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % 2, f"p{index}", prompt)
    ranks.add(0, "bad", [3999, 1, 2])
    falls = 0
    while not any(output.finish_reason for output in ranks.threads[0].outputs("bad")):
        ranks.form([0, 1])
        falls += 1
        assert falls < 4
        for thread in ranks.threads:
            thread.join()
        broken = ranks.threads[0].ended
        assert isinstance(broken, Desynchronised) and broken.own and "cursed" in str(broken)
        ranks.threads[0].said += ranks.threads[0].core.take_news()
    ranks.form([0, 1])
    ranks.drain([0, 1])
    assert falls == 2, "once with the others, once alone"
    assert "cursed" in (ranks.threads[0].outputs("bad")[-1].error or "")
    assert [ranks.threads[index % 2].tokens(f"p{index}") for index in range(len(PROMPTS))] == alone
