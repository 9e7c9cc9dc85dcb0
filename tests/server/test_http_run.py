"""The server's life: port first, 503 while loading, ready, draining on a signal, and how each of these goes wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import httpx
import pytest
from server_fakes import HANG, Live, MockEngine, events, eventually, live

from coterie.engine.messages import Stats
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.config import ServerConfig
from coterie.server.run import bind, serve, stats_line, url_of
from coterie.spec.errors import CoterieError

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def test_port_in_use_is_one_line_before_anything_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CoterieError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--port") as caught:
            serve(lambda observer: pytest.fail("the model was loaded"), ServerConfig(port=port))
        assert "\n" not in str(caught.value)


def test_unknown_host_is_one_line():
    with pytest.raises(CoterieError, match="--host"):
        bind("no.such.host.invalid", 0)


def test_free_port_and_urls():
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", None)):
        with bind(host, 0) as listener:
            port = listener.getsockname()[1]
            assert port > 0
            assert shown is None or url_of(listener) == f"http://{shown}:{port}"


def test_loopback_is_the_default():
    assert ServerConfig().host == "127.0.0.1"
    assert len(ServerConfig.__dataclass_fields__) <= 20


def test_health_says_loading_until_the_model_is_there():
    engine, go = MockEngine(), threading.Event()

    def launch(observer):
        assert go.wait(10)
        return engine

    server = Live(launch)
    server.start()
    for path in ("/health", "/ready", "/v1/models"):
        response = httpx.get(server.url + path)
        assert response.status_code == 503 and response.headers["retry-after"]
    assert httpx.post(server.url + CHAT, json=HELLO).json()["error"]["code"] == "loading"
    assert httpx.get(server.url + "/metrics").status_code == 200
    assert not server.ready.is_set()
    go.set()
    assert server.ready.wait(10)
    for path in ("/health", "/ready", "/v1/models"):
        assert httpx.get(server.url + path).status_code == 200
    assert engine.observer is server.server.state.metrics
    server.stop()
    server.join()
    assert server.error is None and engine.shut_down == [False]


def test_failed_load_ends_the_server_with_its_error():
    def launch(observer):
        raise CoterieError("the folder is no model")

    server = Live(launch)
    server.start()
    server.join()
    assert isinstance(server.error, CoterieError) and "no model" in str(server.error)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_stop_while_loading():
    engine, go = MockEngine(), threading.Event()

    def launch(observer):
        go.wait(10)
        return engine

    server = Live(launch)
    server.start()
    server.stop()
    server.join()
    assert server.error is None and engine.shut_down == []
    go.set()
    assert eventually(lambda: engine.shut_down == [False]), "an engine that comes up too late is shut down"


@pytest.mark.parametrize("content, said", [
    (b"{% if %}", "own.jinja: the chat template is not valid jinja2"), (b"\xff", "cannot read the chat template"),
    (None, "cannot read the chat template"),
])  # fmt: skip
def test_a_template_that_cannot_be_used_is_said_before_anything_loads(tmp_path, content, said):
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CoterieError, match=said) as caught:
        serve(lambda observer: pytest.fail("loading began"), ServerConfig(port=0, chat_template=str(file)))
    assert str(file) in str(caught.value)


def test_running_requests_may_finish(caplog):
    caplog.set_level(logging.INFO, "coterie.server")
    engine = MockEngine(
        lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), 0.5, ChoiceDelta(0, "b", (2,), finish_reason="stop")]
    )
    with live(engine, shutdown_seconds=10.0) as server:
        with httpx.stream("POST", server.url + CHAT, json=HELLO | {"stream": True}) as response:
            pieces = response.iter_text()
            text = next(pieces)
            server.stop()
            text += "".join(pieces)
        server.join()
    assert text.endswith("data: [DONE]\n\n")
    assert any("1 requests may run on for 10 s" in record.getMessage() for record in caplog.records)
    assert engine.aborted == [] and engine.shut_down == [False]
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_nothing_is_lost_when_the_server_stops_under_load():
    """Whatever had begun is answered; whoever comes later is told so, until the last answer is out."""

    def script(prompt, params):
        pause = 3.0 if params.max_tokens == 7 else 0.05
        return [PromptInfo(), ChoiceDelta(0, "a", (1,)), pause, ChoiceDelta(0, "b", (2,), finish_reason="stop")]

    engine = MockEngine(script)
    answers, stopped = [], threading.Event()

    def client(url, **fields):
        while True:
            late = stopped.is_set()
            try:
                answers.append((late, httpx.post(url + CHAT, json=HELLO | fields, timeout=30)))
            except httpx.TransportError:
                assert late, "a request that came before the stop was lost"
                return

    with live(engine, shutdown_seconds=20.0) as server:
        threads = [threading.Thread(target=client, args=(server.url,)) for _ in range(12)]
        slow = threading.Thread(target=client, args=(server.url,), kwargs={"max_tokens": 7})
        for thread in threads:
            thread.start()
        assert eventually(lambda: len(answers) > 30)
        slow.start()
        assert eventually(lambda: any(params.max_tokens == 7 for _, params in engine.asked))
        server.stop()
        assert eventually(lambda: server.server.state.phase == "draining")
        stopped.set()
        assert httpx.get(server.url + "/ready").status_code == 503
        server.join()
        for thread in (*threads, slow):
            thread.join(20)
    good = [answer for _, answer in answers if answer.status_code == 200]
    refused = [answer for _, answer in answers if answer.status_code != 200]
    assert all(answer.json()["choices"][0]["message"]["content"] == "ab" for answer in good)
    assert refused and all(answer.status_code == 503 and int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert all(answer.status_code == 503 for late, answer in answers if late)
    assert engine.aborted == [] and len(engine.finished) == len(good) == len(engine.started)


@pytest.mark.parametrize("stops", [1, 2])
def test_requests_that_do_not_finish_are_ended_with_an_error(stops):
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), HANG])
    with live(engine, shutdown_seconds=0.3 if stops == 1 else 60.0) as server:
        answers = []

        def whole():
            answers.append(httpx.post(server.url + CHAT, json=HELLO, timeout=30))

        other = threading.Thread(target=whole)
        other.start()
        with httpx.stream("POST", server.url + CHAT, json=HELLO | {"stream": True}) as response:
            pieces = response.iter_text()
            text = next(pieces)
            assert eventually(lambda: len(engine.started) == 2)
            server.stop(times=stops)
            text += "".join(pieces)
        other.join(10)
        server.join()
    assert events(text)[-1]["error"]["code"] == "shutting_down"
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    assert sorted(engine.aborted) == sorted(engine.started)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_cleanly(number, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent("""
        import sys
        from server_fakes import MockEngine
        from coterie.server.config import ServerConfig
        from coterie.server.run import serve
        engine = MockEngine()
        serve(lambda observer: engine, ServerConfig(port=0), lambda url: print(url, flush=True))
        print("shut down", engine.shut_down, flush=True)
    """))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert httpx.post(url + CHAT, json=HELLO).status_code == 200
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and out == "shut down [False]\n"


def test_open_host_without_a_key_is_warned_about(caplog):
    with live(MockEngine(), host="0.0.0.0"):
        pass
    assert any("without an API key" in record.getMessage() for record in caplog.records)


BEFORE = Stats(0, 0, 0.0, 10, 0, 0, 0, 100, 10, 5, {})


def test_stats_line_is_about_the_last_seconds_and_silent_when_idle():
    assert stats_line(None, Stats(0, 0, 0.0, 10, 0, 0, 0, 0, 0, 0, {}), 10.0) is None
    assert stats_line(BEFORE, BEFORE, 10.0) is None
    now = Stats(2, 3, 0.25, 10, 0, 40, 10, 300, 60, 9, {})
    line = stats_line(BEFORE, now, 10.0)
    assert line == "running 2 | waiting 3 | KV 25.0% | prompt 20.0 tok/s | generation 5.0 tok/s | prefix hits 25%"


def test_stats_are_logged_while_something_runs(caplog):
    caplog.set_level(logging.INFO, "coterie.server")
    engine = MockEngine()
    engine.now = Stats(1, 0, 0.5, 10, 0, 0, 0, 8, 2, 1, {})
    with live(engine, stats_log_seconds=0.05):
        assert eventually(lambda: any("running 1 | waiting 0" in record.getMessage() for record in caplog.records))


def test_garbage_on_the_port_does_no_harm():
    with live(MockEngine()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        headless = json.dumps(HELLO).encode() + b"\r\n\r\n"
        for garbage in (b"\x00" * 1000, b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n", headless):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(garbage)
                connection.settimeout(5)
                connection.recv(100)
        assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200
