"""Bug report F2 on the real engine: 200 clients go away in every state, and nothing of theirs is left.

Each sequence that ran or waited gets exactly one abort, none that had finished gets one, its blocks are free again
and at most the step in flight is still computed for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from real_server import TEXT, Live, Spy, long_folder, open_request, real_server, wait

ENDLESS = {"prompt": "hang on", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
CHUNK, RUNNING = 32, 4


@pytest.fixture
def bench(tmp_path) -> Iterator[tuple[Live, Spy]]:
    options = {"max_running_requests": RUNNING, "max_queued_requests": 32, "max_model_len": 4096}
    with real_server(long_folder(tmp_path), kv_cache_tokens=4 * 4096, chunked_prefill_size=CHUNK, **options) as pair:
        yield pair


def close_all(spy: Spy, connections: list, sequences: int) -> None:
    """Hang up; every sequence since is aborted once and its memory comes back."""
    free = spy.core.scheduler.pool.num_blocks
    before = len(spy.aborts)
    for connection in connections:
        connection.close()
    wait(lambda: len(spy.aborts) == before + sequences)
    wait(lambda: spy.is_quiet)
    assert spy.core.scheduler.pool.num_free == free


def test_f2_two_hundred_clients_go_away(bench: tuple[Live, Spy]) -> None:
    server, spy = bench
    closes, finished = 0, 0

    def after_three_tokens(bodies: list[dict], sequences: int) -> None:
        nonlocal closes
        known = len(spy.adds)
        connections = [open_request(server.url, ENDLESS | body) for body in bodies]
        wait(lambda: len(spy.adds) == known + sequences)
        wait(lambda: all(spy.tokens[name] >= 3 for name in spy.adds[known:]))
        close_all(spy, connections, sequences)
        closes += len(connections)

    def while_queued(stream: bool) -> None:
        """Four run, six wait: those that wait go first."""
        nonlocal closes
        known = len(spy.adds)
        running = [open_request(server.url, ENDLESS | {"stream": stream}) for _ in range(RUNNING)]
        wait(lambda: len(spy.adds) == known + RUNNING and spy.core.scheduler.num_running == RUNNING)
        queued = [open_request(server.url, ENDLESS | {"stream": stream}) for _ in range(6)]
        wait(lambda: spy.core.scheduler.num_waiting == 6)
        aborted = len(spy.aborts)
        for connection in queued:
            connection.close()
        wait(lambda: len(spy.aborts) == aborted + 6)
        assert not set(spy.aborts[aborted:]) & set().union(*spy.steps), "they were never computed"
        close_all(spy, running, RUNNING)
        closes += RUNNING + 6

    for wave in range(12):
        after_three_tokens([{"stream": True}] * 4, 4)
        after_three_tokens([{"stream": False}] * 4, 4)
        after_three_tokens([{"stream": True, "n": 4}], 4)
        after_three_tokens([{"stream": False, "n": 4}], 4)
        if wave < 8:
            while_queued(stream=wave % 2 == 0)
        for stream in (True, False):
            short = {"prompt": "short", "max_tokens": 3, "n": 2, "stream": stream, "ignore_eos": True}
            assert httpx.post(server.url + TEXT, json=short, timeout=60).status_code == 200
            finished += 2
    assert closes == 200
    wait(lambda: spy.is_quiet)

    aborts = Counter(spy.aborts)
    assert set(aborts.values()) == {1}, "exactly one abort each"
    assert spy.ended.keys() == set(spy.adds)
    assert {name for name, reason in spy.ended.items() if reason == "abort"} == aborts.keys()
    assert Counter(spy.ended.values()) == {"abort": len(aborts), "length": finished}, "none for those that finished"
    last = {name: number for number, step in enumerate(spy.steps, start=1) for name in step}
    late = {name: last[name] - at for name, at in spy.steps_at_abort.items() if name in last}
    assert max(late.values()) <= 1, "at most the step in flight"


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
def test_f2_in_the_second_of_five_chunks(bench: tuple[Live, Spy], stream: bool, n: int) -> None:
    server, spy = bench
    prompt = [7 + i % 200 for i in range(4 * CHUNK + 9)]
    for _ in range(5):
        known = len(spy.adds)
        spy.hold(lambda request: request.num_computed_tokens == CHUNK and request.num_scheduled_tokens == CHUNK)
        connection = open_request(server.url, ENDLESS | {"prompt": prompt, "stream": stream, "n": n})
        assert spy.held.wait(30), "the second chunk is being computed"
        connection.close()
        wait(lambda count=known + n: len(spy.aborts) == count)
        spy.release.set()
        wait(lambda: spy.is_quiet)
        names = spy.adds[known:]
        assert sorted(spy.aborts[known:]) == sorted(names) and len(names) == n
        assert sum(spy.computed(name) for name in names) == 2, "two chunks of five and no more"
        assert all(spy.tokens[name] == 0 for name in names)
        prompt = [token + 1 for token in prompt]  # nothing of it may come from the cache
    assert httpx.post(server.url + TEXT, json={"prompt": "next", "max_tokens": 2}, timeout=60).status_code == 200
