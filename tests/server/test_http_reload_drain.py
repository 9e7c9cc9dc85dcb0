"""Exchange of the model where memory does not hold two: the old one ends and goes before the new one is loaded.

Whoever is told to come back and does is answered; a model that cannot be loaded leaves a server that says so and takes
another one.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import HANG, Live, MockEngine, eventually, live
from test_http_reload import ADMIN, RELOAD, TEXT, ask, clients, launch, models, server, texts

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.observe.requests import RequestObserver
from coterie.server.config import Access, AdminConfig
from coterie.spec.errors import CoterieError

__all__ = ["models", "server"]  # fixtures


def exchange(url: str, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + RELOAD, json={"model": model, "drain": True} | fields, headers=ADMIN, timeout=60)


def admin_of(models: Path) -> Access:
    return Access(admin=AdminConfig(key="root", folders=(str(models),)))


def health(url: str) -> tuple[int, int, str]:
    ready = httpx.get(url + "/ready")
    return httpx.get(url + "/health").status_code, ready.status_code, ready.json()["status"]


def test_no_request_is_lost(server: Live) -> None:
    """Eight clients that come back when they are told to: each answer is whole and of one model."""
    url = server.url
    expected = {"one": texts(url)}
    assert exchange(url, "two").status_code == 200
    expected["two"] = texts(url)
    with clients(url, expected, retry_after="5") as seen:
        for name in ("one", "two", "one"):
            more = seen.more_of(name)
            answer = exchange(url, name)
            assert answer.status_code == 200 and answer.json()["model"] == "m", answer.text
            assert eventually(more)
    assert seen.wrong == [] and set(seen.told) == {"exchanging"} and texts(url) == expected["one"]


def test_running_requests_end_before_anything_is_loaded_and_the_old_engine_is_let_go(models: Path) -> None:
    old = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "old", (1,)), HANG])
    gone = weakref.ref(old)
    alive_at_load: list[bool] = []

    def relaunch(path: str, observer: RequestObserver) -> MockEngine:
        alive_at_load.append(gone() is not None and gone().shut_down != [False])  # type: ignore[union-attr]
        return MockEngine()

    with live(old, relaunch, access=admin_of(models)) as server, ThreadPoolExecutor(1) as pool:
        with httpx.stream("POST", server.url + TEXT, json={"prompt": "x", "stream": True}, timeout=30) as response:
            pieces = response.iter_text()
            assert "old" in next(pieces)
            pending = pool.submit(exchange, server.url, "one")
            assert eventually(lambda: server.server.state.phase == "exchanging")
            refused = ask(server.url, "x")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["code"] == "exchanging"
            assert health(server.url) == (200, 503, "exchanging"), "it lives, and takes nothing new"
            assert exchange(server.url, "one").status_code == 409, "one at a time"
            assert old.shut_down == [] and old.aborted == [] and not alive_at_load
        assert pending.result().status_code == 200
        assert alive_at_load == [False] and old.shut_down == [False]
        state = server.server.state
        assert state.loaded is not None and state.loaded.engine is not old and old not in state._preparing
        assert ask(server.url, "x").status_code == 200 and health(server.url) == (200, 200, "ready")


def test_a_failure_to_load_leaves_a_server_that_says_so_and_takes_another_model(models: Path) -> None:
    errors: list[Exception] = [CoterieError("it needs 9 GB, 1 GB can be had"), MemoryError()]

    def relaunch(path: str, observer: RequestObserver) -> MockEngine:
        if errors:
            raise errors.pop(0)
        return MockEngine()

    with live(MockEngine(), relaunch, access=admin_of(models)) as server:
        failed = exchange(server.url, "one")
        assert failed.status_code == 400 and failed.json()["error"]["code"] == "model_rejected"
        message = failed.json()["error"]["message"]
        assert "needs 9 GB" in message and "none serves: send another reload" in message
        for _ in range(2):
            refused = ask(server.url, "x")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_model"
            assert refused.headers["retry-after"] == "30"
            assert httpx.get(server.url + "/v1/models").status_code == 503
            assert httpx.get(server.url + "/metrics").status_code == 200
            assert health(server.url) == (503, 503, "no model")
            if errors:
                assert exchange(server.url, "two", drain=False).status_code == 500
        assert exchange(server.url, "two", drain=False).status_code == 200, "nothing is left to drain"
        assert ask(server.url, "x").status_code == 200 and health(server.url) == (200, 200, "ready")


def test_what_shows_without_reading_weights_is_refused_before_anything_changes(server: Live) -> None:
    before = texts(server.url)
    for model, status in (("broken", 400), ("nothing", 403), ("../outside", 403)):
        refused = exchange(server.url, model)
        assert refused.status_code == status, refused.text
        assert status == 403 or "nothing has changed" in refused.json()["error"]["message"]
    assert exchange(server.url, "one", drain="yes").status_code == 400
    assert texts(server.url) == before and health(server.url) == (200, 200, "ready")


@pytest.mark.parametrize("when", ["waits", "loads"])
def test_a_server_that_stops_meanwhile_ends(models: Path, when: str) -> None:
    go, made = threading.Event(), MockEngine()

    def relaunch(path: str, observer: RequestObserver) -> MockEngine:
        assert go.wait(10)
        return made

    old = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "old", (1,)), HANG])
    with live(old, relaunch, access=admin_of(models)) as server, ThreadPoolExecutor(2) as pool:
        if when == "waits":
            pool.submit(lambda: ask(server.url, "x"))
            assert eventually(lambda: bool(old.started))
        pending = pool.submit(exchange, server.url, "one")
        assert eventually(lambda: server.server.state.phase == "exchanging")
        server.stop(times=2)
        server.join()
        go.set()
        assert pending.exception() is not None or pending.result().status_code >= 500
    assert old.shut_down and (when == "waits" or eventually(lambda: made.shut_down == [False]))


def test_memory_of_the_old_model_is_free_when_the_new_one_is_loaded(models: Path) -> None:
    """With real engines: nothing of the server keeps the old one."""
    engines: list[weakref.ref[Any]] = []

    def watched(path: str, observer: RequestObserver) -> Any:
        left = sum(engine() is not None for engine in engines)
        assert left == 0, "an engine from before is still there"
        engine = launch(path, observer)
        engines.append(weakref.ref(engine))
        return engine

    made = Live(lambda observer: watched(str(models / "one"), observer), watched, access=admin_of(models))
    made.start()
    try:
        assert made.ready.wait(30), made.error
        for name in ("two", "one"):
            assert httpx.post(made.url + TEXT, json={"prompt": "x", "max_tokens": 3}).status_code == 200
            answer = exchange(made.url, name)
            assert answer.status_code == 200, answer.text
    finally:
        made.stop(times=2)
        made.join()
