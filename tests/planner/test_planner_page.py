"""The what-if page: its answers, what it refuses, and the page itself in a browser, where there is one.

The browser is driven over its debugging port with a WebSocket of forty lines, so that no package is needed.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from coterie.planner.measured import Constants, Measured, Share
from coterie.planner.measured_file import file_text
from coterie.planner.models import model
from coterie.planner.page import Offer, answer, asked, offer, page_server
from coterie.spec import SpecError
from coterie.spec.hardware import HardwareSpec

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "headless_shell"))), None
)


@pytest.fixture(scope="module")
def offered() -> Offer:
    return offer()


@pytest.fixture(scope="module")
def port(offered: Offer) -> Iterator[int]:
    with page_server(offered, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def get(port: int, path: str, host: str = "") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, dict(reply.getheaders()), body


def test_an_answer_has_the_charts_and_changes_with_its_inputs(port: int) -> None:
    status, _, body = get(port, "/answer?" + urlencode({"devices": 8, "tpot": 50}))
    found = json.loads(body)
    assert status == 200 and all(found[name].startswith("<svg") for name in ("budget", "limits", "pareto"))
    assert "routed experts" in found["budget"] and "B_SLO" in found["limits"] and 'class="best"' in found["pareto"]
    more = json.loads(get(port, "/answer?" + urlencode({"devices": 16, "tpot": 50, "kv": "fp8"}))[2])
    assert all(more[name] != found[name] for name in ("budget", "limits", "pareto", "words"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "../../etc/passwd"}, "model '../../etc/passwd' is not one of"),
        ({"hardware": "/etc/x.yaml"}, "is not one of"),
        ({"skew": "/etc/counts.npy"}, "is not a skew of this page"),
        ({"devices": "0"}, "devices must be a whole number from 1 to 1,024"),
        ({"devices": "1e9"}, "devices must be a whole number"),
        ({"tpot": "nan"}, "tpot must be a number"),
        ({"tpot": "-1"}, "the SLO's tpot must be above 0"),
        ({"hardware": "RTX-4090", "devices": "2"}, "does not fit on 2 x RTX-4090"),
    ],
)
def test_bad_inputs_are_refused_in_one_line(values: dict[str, str], words: str, offered: Offer, port: int) -> None:
    with pytest.raises(SpecError):
        answer(offered, values)
    status, _, body = get(port, "/answer?" + urlencode(values))
    assert status == 400 and words in json.loads(body)["error"]


def test_a_limit_that_nothing_keeps_is_said_not_hidden(offered: Offer) -> None:
    found = answer(offered, {"tpot": "1"})
    assert "no layout reaches 1 ms a token" in found["words"][0] and found["shown"].endswith("the fastest")


def test_what_the_command_line_gave_is_planned_as_it_is(tmp_path: Path) -> None:
    """A measured machine with its own times under its own name, a file's own format and place; not so for others."""
    own = HardwareSpec(name="EPYC-9654", kind="cpu", bf16_tops=0.3, int8_tops=0.9, memory_gb=64, memory_gbps=30)
    shares = tuple(
        Share(form, 4096.0, 1e9, rows, 0.6) for form in ("bf16", "int8", "int4", "gqa") for rows in (1.0, 64)
    )
    constants = Constants(step=1e-4, dense_layer=2e-5, moe_layer=5e-5, stream=1e-5, value=1e-10, row=3e-7, logit=2e-10)
    path = tmp_path / "machine.yaml"
    path.write_text(file_text(own, Measured(2, "avx512", ((1e7, 40.0), (1e9, 30.0)), shares, constants)))
    given = offer(str(tmp_path), str(path), lambda _: ("mine", model("Qwen3-8B")[1], "int4"))
    search, place, _, _ = asked(given, {"devices": "1"})
    assert search.hardware.memory_gb == 64 and search.known.how.startswith("our engine as measured on this machine")
    assert search.like.weights == "int4" and place == str(tmp_path)
    assert f"coterie serve {tmp_path}" in "\n".join(answer(given, {"devices": "1"})["words"])
    other, name, _, _ = asked(given, {"devices": "1", "model": "Qwen3-8B", "hardware": "Xeon-6980P"})
    assert other.like.weights == "bf16" and name == "Qwen3-8B" and "as measured" not in other.known.how


def test_fixed_layouts_are_kept(offered: Offer) -> None:
    assert "tp 8 dp 1" in answer(offered, {"tp": "8"})["shown"]


def test_only_this_machine_is_answered_and_nothing_else_is_served(port: int) -> None:
    assert get(port, "/", host="evil.example")[0] == 403
    assert get(port, "/", host="localhost:1")[0] == 200
    assert get(port, "/../pyproject.toml")[0] == 404 and get(port, "/hardware.csv")[0] == 404
    headers = get(port, "/")[1]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_a_request_that_is_none_is_refused_in_a_line(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    many = "/answer?" + "&".join(f"a{number}=1" for number in range(41))
    for path, host in (("/", "[::1"), (many, "localhost"), ("http://[::1/", "localhost")):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as stream:
            stream.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            head, _, body = stream.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), (path, host, head)
        assert body.startswith(b"this is no request for this page: ") and b"\n" not in body
    assert get(port, "/")[0] == 200 and capfd.readouterr().err == ""


def test_the_page_names_no_other_host(port: int) -> None:
    for path in ("/", "/page.js"):
        text = get(port, path)[2].decode()
        assert "http" not in text.replace("http-equiv", "") and "//" not in text.replace("// ", "")


class Browser:
    """A tab of a headless browser: `evaluate` runs a line of script and returns its value."""

    def __init__(self, folder: Path, address: str) -> None:
        assert BROWSER is not None
        words = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1400,1000",
                 "--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1", address]  # fmt: skip
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.numbers = itertools.count(1)
        note = folder / "DevToolsActivePort"
        wait_for(note.exists, 60)
        wait_for(lambda: len(note.read_text().splitlines()) > 1, 10)
        self.port = int(note.read_text().splitlines()[0])
        self.socket = self._connect(self._tab(address))

    def _tab(self, address: str) -> str:
        found: list[dict[str, str]] = []

        def listed() -> bool:
            tabs = json.loads(get(self.port, "/json")[2])
            found[:] = [tab for tab in tabs if tab["url"].startswith(address) and "webSocketDebuggerUrl" in tab]
            return bool(found)

        wait_for(listed, 60)
        return found[0]["webSocketDebuggerUrl"].partition(str(self.port))[2]

    def _connect(self, path: str) -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Upgrade: websocket", "Connection: Upgrade",
                 f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]  # fmt: skip
        stream.sendall("\r\n".join(lines).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += stream.recv(1)
        assert b" 101 " in head
        return stream

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the browser has gone"
            data += part
        return data

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self.numbers)
        payload = json.dumps({"id": number, "method": method, "params": parameters}).encode()
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        self.socket.sendall(b"\x81\xfe" + len(payload).to_bytes(2, "big") + mask + masked)
        while True:
            _, short = self._read(2)
            size = {126: 2, 127: 8}.get(short, 0)
            length = int.from_bytes(self._read(size), "big") if size else short
            message = json.loads(self._read(length))
            if message.get("id") == number:
                return message["result"]

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(30)


def wait_for(true: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to be in time"
        time.sleep(0.05)


def fill(name: str, value: str) -> str:
    """Script that types a value into an input."""
    return (
        f"(() => {{ const input = document.getElementById('{name}'); input.value = '{value}';"
        " input.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_the_page_redraws_in_a_browser(port: int, tmp_path: Path) -> None:
    browser = Browser(tmp_path, f"http://127.0.0.1:{port}/")
    try:
        drawn = "Number(document.body ? document.body.dataset.drawn || 0 : 0)"
        wait_for(lambda: browser.evaluate(drawn) >= 1, 60)
        charts = "['budget', 'limits', 'pareto'].map(name => document.getElementById(name).innerHTML)"
        first = browser.evaluate(charts)
        assert all(chart.startswith("<svg") for chart in first)
        before = browser.evaluate(drawn)
        browser.evaluate(fill("devices", "16"))
        wait_for(lambda: browser.evaluate(drawn) > before, 60)
        second = browser.evaluate(charts)
        assert all(new != old for new, old in zip(second, first, strict=True))
        browser.evaluate(fill("hardware", "RTX-4090"))
        error = "document.getElementById('error').textContent"
        wait_for(lambda: "does not fit" in browser.evaluate(error), 60)
        assert browser.evaluate(charts) == second  # what was drawn stays, greyed
        browser.evaluate(fill("hardware", "H200-SXM-141GB"))
        wait_for(lambda: browser.evaluate(error) == "", 60)
        assert "H200" in browser.evaluate("document.getElementById('budget').textContent")
        loaded = browser.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert loaded and all(name.startswith(f"http://127.0.0.1:{port}/") for name in loaded)
        wide = browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0
    finally:
        browser.close()
