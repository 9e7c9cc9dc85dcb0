"""Scheduler: fairness, memory, prefix reuse and ends, on a mock engine whose memory knows whose rows it holds."""

from __future__ import annotations

import pytest
from scheduling import EOS, MockEngine, finished_well, next_token

from coterie.cache.block_pool import BlockPool
from coterie.engine.errors import EngineBusy, InvalidRequest
from coterie.engine.messages import SamplingParams
from coterie.engine.request import Request, Schedule, Status
from coterie.engine.scheduler import MAX_OVERTAKES, Scheduler, SchedulerLimits


def limits(**changes: int | bool) -> SchedulerLimits:
    base: dict[str, int | bool] = {"token_budget": 16, "max_running": 8, "max_queued": 1000, "page_size": 4}
    return SchedulerLimits(**{**base, **changes})  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * 7) % 47 + 2 for i in range(length)]


# Sharing a step


def test_streams_ride_along_and_a_short_prompt_passes_a_long_one() -> None:
    engine = MockEngine(limits(), 500)
    streams = [engine.add(f"stream{i}", prompt(3, i), 200) for i in range(4)]
    for _ in range(5):
        engine.step()
    engine.add("long", prompt(50 * 16, 10), 4)
    engine.step()
    engine.add("short", prompt(10, 11), 4)
    arrived = len(engine.steps)
    while "long" not in engine.token_steps:
        engine.step()
        assert {e.request for e in engine.steps[-1].entries} >= set(streams), "a running stream missed a step"
    assert engine.first_step["short"] <= arrived + 1
    assert engine.token_steps["short"][-1] < engine.token_steps["long"][0]
    assert len(engine.steps) < 50 * 16 / 6 + 20, "the long prompt has at least half of what the streams leave"
    engine.drain()


def test_a_lone_prompt_takes_the_whole_budget() -> None:
    engine = MockEngine(limits(), 100)
    engine.add("a", prompt(40))
    for _ in range(3):
        engine.step()
    assert [step.num_tokens for step in engine.steps] == [16, 16, 8]


def test_a_short_prompt_passes_many_long_ones() -> None:
    engine = MockEngine(limits(max_running=4), 2000)
    longs = [engine.add(f"long{i}", prompt(400, i), 2) for i in range(10)]
    engine.step()
    engine.add("short", prompt(8, 99), 2)
    engine.step()
    assert engine.token_steps["short"] == [1]
    engine.drain()
    assert all(finished_well(request) for request in longs)
    assert sorted(engine.first_step, key=lambda name: engine.first_step[name])[:3] == ["long0", "short", "long1"]


def test_equals_start_and_answer_in_order_of_arrival() -> None:
    engine = MockEngine(limits(enable_prefix_caching=False, max_running=5), 60)
    for i in range(40):
        engine.add(f"{i:02}", prompt(21, i), 6)
    engine.drain()
    names = [f"{i:02}" for i in range(40)]
    assert sorted(names, key=lambda n: engine.first_step[n]) == names
    assert sorted(names, key=lambda n: engine.token_steps[n][0]) == names


@pytest.mark.parametrize(("max_running", "num_blocks"), [(3, 400), (8, 60)])
def test_endless_short_prompts_do_not_starve_long_ones(max_running: int, num_blocks: int) -> None:
    engine = MockEngine(limits(max_running=max_running), num_blocks)
    longs = [engine.add(f"long{i}", prompt(150, i), 5) for i in range(3)]
    for i in range(400):
        if engine.scheduler.num_waiting < 20:
            engine.add(f"short{i}", prompt(6, i + 10), 3)
        engine.step()
    assert all(finished_well(request) for request in longs)
    starts = sorted(engine.first_step.values())
    assert starts.index(engine.first_step["long1"]) < starts.index(engine.first_step["long0"]) + 3 * MAX_OVERTAKES
    engine.drain()


def test_short_prompts_keep_passing_when_the_next_long_one_is_due() -> None:
    engine = MockEngine(limits(max_running=20), 1000)
    engine.add("long", prompt(900, 1), 2)
    engine.add("longer", prompt(1200, 2), 2)
    for i in range(30):
        engine.add(f"short{i}", prompt(6, i + 3), 2)
        engine.step()
    while engine.scheduler.num_running > 2:
        engine.step()
    assert "long" not in engine.token_steps
    assert all(f"short{i}" in engine.token_steps for i in range(30))
    assert sum(step < engine.first_step["longer"] for step in engine.first_step.values()) <= 1 + MAX_OVERTAKES + 1
    engine.drain()


@pytest.mark.parametrize("token_budget", [1, 2, 3, 7])
def test_a_budget_smaller_than_the_streams_is_shared_in_turns(token_budget: int) -> None:
    engine = MockEngine(limits(token_budget=token_budget, max_running=9), 500)
    requests = [engine.add(f"{i}", prompt(1, i), 150) for i in range(9)]
    while engine.scheduler.num_waiting:
        engine.step()
    begin = len(engine.steps)
    for _ in range(90):
        engine.step()
    served = [sum(step >= begin for step in engine.token_steps[r.request_id]) for r in requests]
    assert max(served) - min(served) <= 1
    engine.drain()
    assert all(finished_well(request) for request in requests)


def test_prompts_advance_although_streams_could_use_the_whole_budget() -> None:
    engine = MockEngine(limits(token_budget=8, max_running=10), 400)
    for i in range(9):
        engine.add(f"stream{i}", prompt(1, i), 200)
    while engine.scheduler.num_waiting:
        engine.step()
    engine.add("new", prompt(12, 50), 2)
    for _ in range(8):
        engine.step()
    assert "new" in engine.token_steps


# Memory


def test_a_request_that_cannot_run_alone_is_refused_at_the_door() -> None:
    engine = MockEngine(limits(), 4)  # 16 rows; the last generated token needs none
    with pytest.raises(InvalidRequest, match=r"needs 17 tokens of cache.*the pool has 16") as error:
        engine.add("a", prompt(10), 8)
    assert error.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="the pool has 16") as error:
        engine.add("b", prompt(17), 1)
    assert error.value.param == "prompt"
    request = engine.add("c", prompt(10), 7)
    engine.drain()
    assert finished_well(request)


def test_door_refuses_a_used_id_an_empty_prompt_and_a_full_queue() -> None:
    engine = MockEngine(limits(max_running=1, max_queued=1), 10)
    engine.add("a", prompt(3))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add("a", prompt(3))
    with pytest.raises(InvalidRequest, match="no tokens"):
        engine.add("b", [])
    engine.add("b", prompt(3))
    with pytest.raises(EngineBusy) as error:
        engine.add("c", prompt(3))
    assert error.value.retry_after > 0
    engine.drain()


def test_the_latest_arrival_is_preempted_and_continues_where_it_was() -> None:
    engine = MockEngine(limits(), 12)
    first, second = engine.add("first", prompt(8), 30), engine.add("second", prompt(8, 1), 30)
    preempted: set[str] = set()
    while engine.scheduler.has_work:
        engine.step()
        preempted |= {request.request_id for request in engine.steps[-1].preempted}
    assert preempted == {"second"}
    assert finished_well(first) and finished_well(second)
    assert engine.scheduler.counters.preemptions == second.num_preemptions >= 1
    assert engine.scheduler.counters.prompt_tokens == 16, "a recomputed prompt is not counted again"
    assert engine.scheduler.counters.generation_tokens == 60
    assert engine.scheduler.counters.prefix_queries == 16


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    engine = MockEngine(limits(token_budget=64), 14)
    engine.add("first", prompt(4), 24)
    second = engine.add("second", prompt(24, 1), 20)
    while not second.num_preemptions:
        engine.step()
    known = second.num_tokens
    before = engine.computed["second"]
    while second.status is Status.WAITING or second.num_uncomputed_tokens > 1:
        engine.step()
    assert engine.computed["second"] - before < known, "nothing was left of its pages"
    engine.drain()
    assert finished_well(second)


@pytest.mark.parametrize("caching", [True, False])
def test_a_tight_pool_does_not_thrash(caching: bool) -> None:
    engine = MockEngine(limits(enable_prefix_caching=caching, token_budget=32), 24)
    requests = [engine.add(f"{i}", prompt(20 + i % 5, i), 16) for i in range(40)]
    engine.drain()
    assert all(finished_well(request) for request in requests)
    useful = sum(request.num_tokens - 1 for request in requests)
    assert sum(engine.computed.values()) < 1.5 * useful
    assert engine.scheduler.counters.preemptions < len(requests)


def test_a_burst_is_not_admitted_beyond_the_pool() -> None:
    engine = MockEngine(limits(token_budget=1000, max_running=40), 60)
    requests = [engine.add(f"{i}", prompt(20, i), 5) for i in range(40)]
    engine.drain()
    assert all(finished_well(request) for request in requests)
    assert engine.scheduler.counters.preemptions == 0


def test_a_request_that_needs_most_of_the_pool_gets_it_in_the_end() -> None:
    engine = MockEngine(limits(), 40)
    engine.add("first", prompt(20, 1), 20)
    engine.step()
    large = engine.add("large", prompt(140, 2), 4)
    for i in range(300):
        if engine.scheduler.num_waiting < 4:
            engine.add(f"small{i}", prompt(20, i + 3), 8 + 7 * i % 17)
        engine.step()
    assert finished_well(large)
    before = [name for name, step in engine.first_step.items() if step < engine.first_step["large"]]
    assert len(before) == 1 + MAX_OVERTAKES


def test_cached_pages_that_a_prompt_would_revive_are_not_room_for_it() -> None:
    engine = MockEngine(limits(token_budget=64), 8)
    engine.add("warm", prompt(17, 1), 1)
    engine.drain()
    running = engine.add("running", prompt(12, 2), 5)
    engine.step()
    revived = engine.add("revived", [*prompt(17, 1), *prompt(4, 3)], 4)
    while running.status is Status.RUNNING:
        assert revived.status is Status.WAITING, "four cached pages and five free ones are the same five"
        engine.step()
    engine.drain()
    assert revived.num_cached_tokens == 16 and finished_well(revived)
    assert engine.scheduler.counters.preemptions == 0


def test_nobody_new_is_admitted_before_a_preempted_request() -> None:
    engine = MockEngine(limits(), 12)
    engine.add("first", prompt(8), 30)
    second = engine.add("second", prompt(8, 1), 30)
    while not second.num_preemptions:
        engine.step()
    engine.add("new", prompt(2, 2), 2)
    while second.status is Status.WAITING:
        assert "new" not in engine.first_step
        engine.step()
    engine.drain()
    assert finished_well(second) and "new" in engine.first_step


@pytest.mark.parametrize("num_blocks", range(14, 40))
def test_streams_that_take_turns_in_a_tight_pool(num_blocks: int) -> None:
    engine = MockEngine(limits(token_budget=2, page_size=1, enable_prefix_caching=False), num_blocks)
    requests = [engine.add(f"{i}", prompt(2, i), 12) for i in range(4)]
    engine.drain()
    assert all(finished_well(request) for request in requests)


# Prefix reuse


def test_a_repeated_prompt_comes_from_the_cache() -> None:
    engine = MockEngine(limits(), 100)
    engine.add("a", prompt(22), 3)
    engine.drain()
    again, longer = engine.add("b", prompt(22), 3), engine.add("c", [*prompt(22), *prompt(9, 5)], 3)
    engine.drain()
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (20, 20)
    assert finished_well(again) and finished_well(longer)
    counters = engine.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (22 + 22 + 31, 40)


def test_generated_pages_are_reused_by_the_next_turn() -> None:
    engine = MockEngine(limits(), 100)
    turn = engine.add("a", prompt(6), 11)
    engine.drain()
    follow = engine.add("b", [*turn.token_ids, *prompt(3, 9)], 2)
    engine.drain()
    assert follow.num_cached_tokens == 16 and finished_well(follow)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine = MockEngine(limits(token_budget=64), 200)
    requests = [engine.add(f"{i}", prompt(41), 2) for i in range(6)]
    other = engine.add("other", prompt(9, 3), 2)
    engine.step()
    assert other.num_output_tokens == 1, "those that wait for pages hold up nobody else"
    engine.drain()
    assert all(finished_well(request) for request in requests)
    assert sum(engine.computed[r.request_id] for r in requests) == 41 + 5 * 1 + 6


def test_waiting_for_pages_ends_when_their_owner_goes() -> None:
    engine = MockEngine(limits(), 200)
    owner, heir = engine.add("owner", prompt(80), 2), engine.add("heir", prompt(80), 2)
    engine.step()
    assert heir.status is Status.WAITING
    assert engine.scheduler.abort("owner") is owner
    engine.step()
    assert heir.num_cached_tokens == 16
    engine.drain()
    assert finished_well(heir)


def test_a_page_half_computed_is_not_offered() -> None:
    engine = MockEngine(limits(token_budget=6), 50)
    engine.add("owner", prompt(30), 2)
    engine.step()
    engine.scheduler.abort("owner")
    heir = engine.add("heir", prompt(30), 2)
    engine.drain()
    assert heir.num_cached_tokens == 4 and finished_well(heir)


def test_prompt_rows_are_asked_for_once_and_never_from_the_cache() -> None:
    engine = MockEngine(limits(), 12)
    scored = SamplingParams(max_tokens=24, ignore_eos=True, prompt_logprobs=1)
    engine.add("warm", prompt(9, 1), 1)
    engine.drain()
    first = engine.add("first", prompt(8), 30)
    request = engine.add("scored", prompt(9, 1), params=scored)
    rows: list[int] = []
    while engine.scheduler.has_work:
        schedule = engine.scheduler.schedule()
        for entry in schedule.entries:
            if entry.request is request:
                rows += entry.logit_positions
                assert not entry.samples or entry.logit_positions[-1] == entry.end - 1
        engine.execute(schedule)
        tokens = {e.request.request_id: [next_token(e.request.token_ids)] for e in schedule.entries if e.samples}
        engine.scheduler.update(schedule, tokens)
    assert request.num_preemptions, "the test means to recompute"
    assert request.num_cached_tokens == 0
    assert rows == list(range(9 + 23)), "each position once, the prompt's and the generated ones'"
    assert finished_well(first) and finished_well(request)


def test_caching_can_be_turned_off() -> None:
    engine = MockEngine(limits(enable_prefix_caching=False), 100)
    requests = [engine.add(f"{i}", prompt(22), 3) for i in range(3)]
    engine.drain()
    assert all(request.num_cached_tokens == 0 and finished_well(request) for request in requests)
    assert engine.pool.num_cached == 0 and engine.scheduler.counters.prefix_queries == 0


# Ends


def run_one(params: SamplingParams, tokens: list[int]) -> tuple[Request, list[int], str | None, int | None]:
    """Feed `tokens` one a step; returns what came out and how it ended."""
    scheduler = Scheduler(limits(), BlockPool(50), eos_token_ids=(EOS, 3))
    request = Request("a", (5, 6, 7), params, 3 + (params.max_tokens if params.max_tokens is not None else 10))
    scheduler.add(request)
    output: list[int] = []
    for token in tokens:
        schedule = scheduler.schedule()
        for news in scheduler.update(schedule, {"a": [token]}):
            output += news.token_ids
            if news.finish_reason is not None:
                assert not scheduler.has_work and request.finish_reason == news.finish_reason
                return request, output, news.finish_reason, news.stop_token_id
    return request, output, None, None


@pytest.mark.parametrize(
    ("params", "tokens", "count", "reason", "stop"),
    [
        (SamplingParams(max_tokens=3), [9, 9, 9, 9], 3, "length", None),
        (SamplingParams(max_tokens=1), [9], 1, "length", None),
        (SamplingParams(max_tokens=None), [9] * 12, 10, "length", None),
        (SamplingParams(max_tokens=9), [9, EOS, 9], 2, "stop", EOS),
        (SamplingParams(max_tokens=9), [3], 1, "stop", 3),
        (SamplingParams(max_tokens=2), [9, EOS], 2, "stop", EOS),
        (SamplingParams(max_tokens=4, ignore_eos=True), [EOS, 3, EOS, 9], 4, "length", None),
        (SamplingParams(max_tokens=9, stop_token_ids=(8, 9)), [4, 9], 2, "stop", 9),
        (SamplingParams(max_tokens=9, stop_token_ids=(8,), ignore_eos=True), [EOS, 8], 2, "stop", 8),
        (SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(8,)), [EOS, 8, 8], 3, "stop", 8),
        (SamplingParams(max_tokens=9, min_tokens=3), [EOS, EOS, 7, EOS], 4, "stop", EOS),
    ],
)
def test_how_a_request_ends(
    params: SamplingParams, tokens: list[int], count: int, reason: str, stop: int | None
) -> None:
    _, output, finish_reason, stop_token_id = run_one(params, tokens)
    assert (output, finish_reason, stop_token_id) == (tokens[:count], reason, stop)


def test_several_tokens_of_one_step_are_cut_at_the_end() -> None:
    scheduler = Scheduler(limits(), BlockPool(50), eos_token_ids=(EOS,))
    request = Request("a", (5, 6, 7), SamplingParams(max_tokens=6), 9)
    scheduler.add(request)
    (news,) = scheduler.update(scheduler.schedule(), {"a": [9, 8]})
    assert news.token_ids == (9, 8) and news.finish_reason is None
    schedule = scheduler.schedule()
    assert [(e.start, e.num_tokens) for e in schedule.entries] == [(3, 2)], "both new tokens are computed"
    (news,) = scheduler.update(schedule, {"a": [4, EOS, 5]})
    assert (news.token_ids, news.finish_reason, news.stop_token_id) == ((4, EOS), "stop", EOS)
    assert scheduler.counters.generation_tokens == 4


def test_a_request_for_scores_only_ends_with_its_prompt() -> None:
    scheduler = Scheduler(limits(token_budget=4), BlockPool(3))
    request = Request("a", tuple(prompt(10)), SamplingParams(max_tokens=0), 10, want_logits=True)
    scheduler.add(request)
    rows: list[int] = []
    news = []
    while scheduler.has_work:
        schedule = scheduler.schedule()
        assert not any(entry.samples for entry in schedule.entries)
        rows += [position for entry in schedule.entries for position in entry.logit_positions]
        news += scheduler.update(schedule, {})
    assert rows == list(range(10))
    assert [(n.token_ids, n.finish_reason) for n in news] == [((), "length")]


def test_abort_frees_a_request_in_every_state() -> None:
    engine = MockEngine(limits(max_running=2), 50)
    decoding = engine.add("decoding", prompt(3), 50)
    engine.step()
    prefilling, waiting = engine.add("prefilling", prompt(60, 1), 5), engine.add("waiting", prompt(60, 2), 5)
    engine.step()
    engine.step()
    assert (prefilling.status, waiting.status) == (Status.RUNNING, Status.WAITING)
    for request in (waiting, prefilling, decoding):
        assert engine.scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort"
        engine.scheduler.check_integrity()
        assert engine.scheduler.abort(request.request_id) is None
    assert engine.pool.num_free == 50 and not engine.scheduler.has_work
    assert engine.scheduler.abort("never heard of") is None


def test_an_abort_while_the_step_runs_is_passed_over_by_update() -> None:
    engine = MockEngine(limits(), 50)
    gone, stays = engine.add("gone", prompt(5), 9), engine.add("stays", prompt(5, 1), 9)
    schedule = engine.scheduler.schedule()
    engine.scheduler.abort("gone")
    engine.add("gone", prompt(7, 3), 2)  # the same id again must not receive the old one's token
    news = engine.scheduler.update(schedule, {"gone": [4], "stays": [4]})
    assert [progress.request for progress in news] == [stays]
    assert gone.num_output_tokens == 0
    engine.scheduler.check_integrity()


def test_a_failed_request_ends_alone_and_its_pages_are_not_trusted() -> None:
    engine = MockEngine(limits(token_budget=64), 50)
    bad, good = engine.add("bad", prompt(13), 9), engine.add("good", prompt(13, 1), 9)
    engine.step()
    schedule = engine.scheduler.schedule()
    engine.scheduler.fail(bad, "the model gave nan")
    engine.scheduler.fail(bad, "twice is once")
    engine.execute(Schedule(tuple(e for e in schedule.entries if e.request is good)))
    engine.scheduler.update(schedule, {"good": [next_token(good.token_ids)]})
    assert (bad.finish_reason, bad.error) == ("error", "the model gave nan")
    again = engine.add("again", prompt(13), 2)
    engine.drain()
    assert again.num_cached_tokens == 0 and finished_well(again) and finished_well(good)


def test_a_step_that_was_never_recorded_is_taken_back() -> None:
    engine = MockEngine(limits(), 50)
    requests = [engine.add(f"{i}", prompt(30, i), 5) for i in range(3)]
    for _ in range(4):
        engine.scheduler.schedule()
        engine.step()
    engine.drain()
    assert all(finished_well(request) for request in requests)


def test_a_step_recorded_in_parts_is_a_step() -> None:
    engine = MockEngine(limits(), 50)
    requests = [engine.add(f"{i}", prompt(3, i), 5) for i in range(3)]
    schedule = engine.scheduler.schedule()
    engine.execute(schedule)
    for entry in schedule.entries:
        token = next_token(entry.request.token_ids)
        assert engine.scheduler.update(Schedule((entry,)), {entry.request.request_id: [token]})
    engine.drain()
    assert all(finished_well(request) for request in requests)


def test_recording_a_step_twice_is_our_mistake() -> None:
    engine = MockEngine(limits(), 50)
    engine.add("a", prompt(3), 5)
    schedule = engine.scheduler.schedule()
    engine.scheduler.update(schedule, {"a": [4]})
    with pytest.raises(AssertionError, match="recorded twice"):
        engine.scheduler.update(schedule, {"a": [4]})


@pytest.mark.parametrize("name", ["token_budget", "max_running", "max_queued", "page_size"])
def test_limits_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        limits(**{name: 0})
