"""ep_faults.py: two "hosts" joined by nothing but a network serve together; ranks are lost, hang, and are cut off.

How long each takes is measured by the benchmark. Here: whoever streams gets one rank's text, or an error that names the
rank in time; the survivors serve; whoever was lost comes back.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ep_faults import FLAGS, PROMPTS, Fault, Outcome, drill, report, spread, texts_of_one_rank
from ep_hosts import Hosts, Stream
from ep_net import Layout, NetError, Network
from rich.console import Console

from coterie.engine.fleet import PATIENCE

TOKENS = 240
SLACK = 2.0
"""On a busy machine, for what must come at most `PATIENCE` after a fault is known."""


@pytest.fixture
def network() -> Iterator[Network]:
    pytest.importorskip("torch")
    try:
        with Network(Layout(1), "10.81.0"):
            pass
    except NetError as error:
        pytest.skip(f"no test network here: {error}")
    with Network(Layout(2), "10.81.0") as made:
        yield made


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    return texts_of_one_rank(TOKENS)


def check(outcome: Outcome) -> None:
    """What holds whatever was lost."""
    assert outcome.wrong == 0 and outcome.unhealthy == 0
    assert outcome.last_error < outcome.known + PATIENCE + SLACK, "nobody waits for longer"
    for stream in outcome.streams:
        assert not stream.error or ("was lost" in stream.error and "on node" in stream.error), stream.error


@pytest.mark.slow
def test_ranks_are_killed_hang_and_are_cut_off(network: Network, tmp_path: Path, wanted: list[str]) -> None:
    with Hosts(network, 2, FLAGS, tmp_path) as hosts:
        for text in ("kill:0", "kill:3", "hang:2", "cut:1", "off:1"):
            outcome = drill(hosts, Fault.parse(text, hosts, 5.0), wanted, TOKENS)
            check(outcome)
            assert text[:4] not in ("kill", "hang") or outcome.right == len(PROMPTS), "one loss costs no request"
        assert hosts.metrics()["ep_faults_total"] == 7
        a_moment_without_cable(hosts, wanted)
        assert hosts.stop() == [0, 0]


def a_moment_without_cable(hosts: Hosts, wanted: list[str]) -> None:
    """Shorter than the beats that may be missed: nothing is lost."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [Stream(prompt, TOKENS) for prompt in PROMPTS]
        answers = [pool.submit(stream.run, hosts.client) for stream in streams]
        hosts.until(lambda: all(len(stream.times) > 20 for stream in streams), "streaming")
        hosts.network.cable(1, plugged=False)
        time.sleep(0.4)
        hosts.network.cable(1, plugged=True)
        assert [answer.result().text for answer in answers] == wanted
    assert hosts.metrics()["ep_faults_total"] == 7


@pytest.mark.slow
def test_without_copies_a_host_that_is_cut_off_is_waited_for(
    network: Network, tmp_path: Path, wanted: list[str]
) -> None:
    few = [*FLAGS, "--redundant-experts", "0"]
    with Hosts(network, 2, few, tmp_path) as hosts:
        refused: list[tuple[int, str]] = []

        def plug_in() -> None:
            refused.append(ask(hosts))
            network.cable(1, plugged=True)

        def unplug() -> None:
            network.cable(1, plugged=False)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            streams = [Stream(prompt, TOKENS) for prompt in PROMPTS]
            answers = [pool.submit(stream.run, hosts.client) for stream in streams]
            hosts.until(lambda: all(len(stream.times) > 20 for stream in streams), "streaming")
            unplug()
            began = time.monotonic()
            known = hosts.until(lambda: hosts.get("/ready")[0] == 503, "aware of it", 10.0) - began
            for answer in answers:
                stream = answer.result()
                assert "was lost: said nothing" in stream.error and "on node 1" in stream.error
                assert stream.ended - began < known + PATIENCE + SLACK
        assert hosts.get("/health")[0] == 200
        plug_in()
        status, body = refused[0]
        assert status == 503 and "16 slots are missing: 2 of 4 ranks are left" in body
        hosts.until(lambda: hosts.get("/ready")[0] == 200, "serving again", 120.0)
        assert Stream(PROMPTS[0], TOKENS).run(hosts.client).text == wanted[0]


def ask(hosts: Hosts) -> tuple[int, str]:
    """A new request."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{hosts.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        assert int(error.headers["Retry-After"]) >= 1
        return error.code, error.read().decode()


def test_outcomes_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Stream("a", 2, text="ab", times=[1.0, 4.0, 5.0]), Stream("b", 2, error="rank 1 on node 0 was lost")
    assert (good.pause(2.0), good.pause(6.0), bad.pause(0.0)) == (2.0, 0.0, 0.0)
    outcome = Outcome("kill:1", 0.1, 0.5, 0.6, 9.0, (good, bad, Stream("c", 2, text="x")), 1, 2.0, 0)
    assert (outcome.right, outcome.errors, outcome.wrong) == (1, 1, 1)
    assert spread([2.0]) == "2.00" and spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    report(Console(width=150), "two hosts", [outcome, outcome])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "kill:1" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == [
        "2", "0.10 (0.10 to 0.10)", "0.50 (0.50 to 0.50)", "0.60 (0.60 to 0.60)", "9.00 (9.00 to 9.00)",
        "6", "2", "2", "2",
    ]  # fmt: skip
