"""Exchange of the model under load: no request is lost, each answer is of one model, and a failure changes nothing."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from server_fakes import HANG, Live, MockEngine, eventually, live, tiny_folder

from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.observe.requests import RequestObserver
from coterie.server.config import Access, AdminConfig, ApiKey
from coterie.spec.errors import CoterieError

TEXT, RELOAD = "/v1/completions", "/v1/admin/reload"
ADMIN = {"Authorization": "Bearer root"}
PROMPTS = [f"{i} to be or not to be" for i in range(6)]
SEEDS = {"one": 1, "two": 2}


def launch(path: str, observer: RequestObserver) -> AsyncEngine:
    """Random weights by the folder's name, so that two models differ."""
    seed = SEEDS.get(Path(path).name, 3)
    config = EngineConfig(load_format="dummy", threads=1, seed=seed, page_size=16, max_model_len=128)
    engine = AsyncEngine.launch(path, config)
    engine.observer = observer
    return engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models, and beside it a third that may not be loaded."""
    root = tmp_path_factory.mktemp("root")
    for name in ("allowed/one", "allowed/two", "allowed/broken", "outside"):
        (root / name).mkdir(parents=True)
        tiny_folder(root / name)
    (root / "allowed/broken/config.json").write_text('{"model_type": "nonsense"}')
    (root / "allowed/link").symlink_to(root / "outside")
    return root / "allowed"


@pytest.fixture
def server(models: Path) -> Iterator[Live]:
    admin = AdminConfig(key="root", folders=(str(models),))
    access = Access(admin=admin)
    made = Live(lambda observer: launch(str(models / "one"), observer), launch, access=access, served_model_name="m")
    made.start()
    try:
        assert made.ready.wait(30), made.error
        yield made
    finally:
        made.stop(times=2)
        made.join()
    assert made.error is None


def ask(url: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    return httpx.post(url + TEXT, json=body, timeout=60)


def texts(url: str) -> dict[str, str]:
    return {prompt: ask(url, prompt).json()["choices"][0]["text"] for prompt in PROMPTS}


def swap(url: str, model: str) -> httpx.Response:
    return httpx.post(url + RELOAD, json={"model": model}, headers=ADMIN, timeout=60)


def swapped(url: str, model: str) -> httpx.Response:
    """Once the reload before it has ended."""
    while (response := swap(url, model)).status_code == 409:
        time.sleep(0.05)
    return response


@dataclass
class Seen:
    """What clients got. `counts`: answers of each model; `wrong`: all that is no model's; `told`: codes of those that
    were asked to come back."""

    counts: dict[str, int]
    wrong: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def more_of(self, name: str) -> Callable[[], bool]:
        """Whether clients have had more than a round of answers of this model since now."""
        before = self.counts[name]
        return lambda: self.counts[name] > before + 8


@contextmanager
def clients(url: str, expected: dict[str, dict[str, str]], *, retry_after: str | None = None) -> Iterator[Seen]:
    """Eight clients that ask without a pause; those that are told to come back after `retry_after` seconds do."""
    stop, seen = threading.Event(), Seen(dict.fromkeys(expected, 0))

    def client(number: int) -> None:
        while not stop.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            response = ask(url, prompt)
            if retry_after and response.status_code == 503 and response.headers["retry-after"] == retry_after:
                seen.told.append(response.json()["error"]["code"])
                time.sleep(0.02)
                continue
            text = response.json()["choices"][0]["text"] if response.status_code == 200 else response.text
            of = [name for name in expected if expected[name][prompt] == text]
            if len(of) == 1:
                seen.counts[of[0]] += 1
            else:
                seen.wrong.append(f"{response.status_code} {text}")

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, number) for number in range(8)]
        try:
            yield seen
        finally:
            stop.set()
        for future in running:
            future.result()


def test_nothing_is_lost_and_every_answer_is_of_one_model(server: Live) -> None:
    url = server.url
    expected = {"one": texts(url)}
    answer = swapped(url, "two")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "m" and answer.json()["max_model_len"] == 128 and answer.json()["seconds"] > 0
    expected["two"] = texts(url)
    assert all(expected["one"][prompt] != expected["two"][prompt] for prompt in PROMPTS)
    with clients(url, expected) as seen:
        for name in ("one", "two", "one", "two"):
            assert swapped(url, name).status_code == 200
            assert eventually(seen.more_of(name))
    assert seen.wrong == [] and min(seen.counts.values()) > 16
    assert texts(url) == expected["two"]


def test_exchanges_leave_no_threads_and_no_memory_behind(server: Live) -> None:
    names = ["two", "one"] * 2
    for name in names:
        assert swapped(server.url, name).status_code == 200
    assert eventually(lambda: not retiring(server))
    gc.collect()
    threads, memory = threading.active_count(), psutil.Process().memory_info().rss
    for name in names * 3:
        assert swapped(server.url, name).status_code == 200
        assert ask(server.url, "x").status_code == 200
    assert eventually(lambda: not retiring(server) and threading.active_count() <= threads + 2)
    gc.collect()
    assert psutil.Process().memory_info().rss - memory < 40e6


def retiring(server: Live) -> bool:
    task = server.server.state.reloader._retiring
    return task is not None and not task.done()


@pytest.mark.parametrize("model", [
    "nothing", "../outside", "link", "", "/etc", ".", "http://127.0.0.1/one", "file:///etc/passwd", "one/config.json",
    "one\x00", "x" * 4000, "~", "one/../../outside",
])  # fmt: skip
def test_only_models_within_the_folders_are_loaded(server: Live, model: str) -> None:
    response = swap(server.url, model)
    assert response.status_code in (400, 403), response.text
    if model:
        assert response.status_code == 403 and response.json()["error"]["code"] == "model_not_allowed"
    assert ask(server.url, "x").status_code == 200


def test_a_model_that_cannot_be_loaded_changes_nothing(server: Live, models: Path) -> None:
    before = texts(server.url)
    response = swap(server.url, "broken")
    assert response.status_code == 400 and response.json()["error"]["code"] == "model_rejected"
    assert "nonsense" in response.json()["error"]["message"] and "still serves" in response.json()["error"]["message"]
    assert texts(server.url) == before
    assert swap(server.url, str(models / "two")).status_code == 200, "an absolute path within the folder is fine"


def test_the_admin_key_and_no_other_opens_the_route(models: Path) -> None:
    admin = AdminConfig(key="root", folders=(str(models),))
    with live(MockEngine(), launch, access=Access(api_keys=(ApiKey("user"),), admin=admin)) as server:
        for headers in ({}, {"Authorization": "Bearer user"}, {"Authorization": "root"}):
            answer = httpx.post(server.url + RELOAD, json={"model": "one"}, headers=headers)
            assert answer.status_code == 401
        assert ask(server.url, "x").status_code == 401
        body = {"prompt": "x"}
        assert httpx.post(server.url + TEXT, json=body, headers=ADMIN).status_code == 401, "it is no client's key"
        document = httpx.get(server.url + "/openapi.json", headers={"Authorization": "Bearer user"}).json()
        assert document["paths"][RELOAD]["post"]["security"] == [{"admin": []}]
    with live(MockEngine()) as server:
        assert swap(server.url, "one").status_code == 404, "without a key there is no such route"


def test_the_old_model_ends_what_it_has_begun_and_a_second_exchange_waits_for_it(models: Path) -> None:
    go = threading.Event()
    old = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "old", (1,)), HANG])
    made: list[MockEngine] = []

    def relaunch(path: str, observer: RequestObserver) -> MockEngine:
        if path.endswith("two") and not go.is_set():
            assert go.wait(10)
        made.append(MockEngine())
        return made[-1]

    admin = AdminConfig(key="root", folders=(str(models),))
    with live(old, relaunch, access=Access(admin=admin)) as server:
        with httpx.stream("POST", server.url + TEXT, json={"prompt": "x", "stream": True}, timeout=30) as response:
            pieces = response.iter_text()
            assert "old" in next(pieces)
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(swap, server.url, "two")
                assert eventually(lambda: server.server.state.reloader._busy)
                assert swap(server.url, "one").status_code == 409, "one at a time"
                go.set()
                assert first.result().status_code == 200
            assert ask(server.url, "x").json()["choices"][0]["text"] == "Hello" and len(made[0].started) == 1
            again = swap(server.url, "one")
            assert again.status_code == 409 and again.headers["retry-after"] == "5"
            assert old.shut_down == [] and old.aborted == []
        assert eventually(lambda: old.shut_down == [False]), "its last request has ended"
        assert swap(server.url, "one").status_code == 200
    assert all(engine.shut_down for engine in made)


def test_a_crash_while_loading_is_a_500_and_the_old_model_serves(models: Path) -> None:
    def relaunch(path: str, observer: RequestObserver) -> MockEngine:
        if path.endswith("two"):
            raise MemoryError
        raise CoterieError("it needs 9 GB, 1 GB can be had")

    with live(MockEngine(), relaunch, access=Access(admin=AdminConfig(key="root", folders=(str(models),)))) as server:
        assert swap(server.url, "two").status_code == 500
        refused = swap(server.url, "one")
        assert refused.status_code == 400 and "needs 9 GB" in refused.json()["error"]["message"]
        assert ask(server.url, "x").status_code == 200


def test_a_server_that_stops_while_it_loads_ends_the_new_engine_too(models: Path) -> None:
    go, made = threading.Event(), MockEngine()

    def relaunch(path: str, observer: RequestObserver) -> MockEngine:
        assert go.wait(10)
        return made

    old = MockEngine()
    admin = AdminConfig(key="root", folders=(str(models),))
    with live(old, relaunch, access=Access(admin=admin)) as server, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(swap, server.url, "one")
        assert eventually(lambda: server.server.state.reloader._busy)
        server.stop(times=2)
        server.join()
        go.set()
        assert eventually(lambda: made.shut_down == [False])
        assert pending.exception() is not None or pending.result().status_code >= 500
    assert old.shut_down == [False]


def test_a_copy_of_the_served_folder_may_be_loaded_again(server: Live, models: Path) -> None:
    shutil.copytree(models / "one", models / "deep" / "one")
    assert swap(server.url, "deep/one").status_code == 200
