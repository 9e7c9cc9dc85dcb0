"""`coterie serve` with several ranks, as its clients meet it: on one machine, and as torchrun starts it on two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

FLAGS = ["--kv-cache-tokens", "8192", "--max-model-len", "512", "--threads", "1", "--log-level", "info"]
PROMPTS = ["To be, or not", "Now is the winter", "Who goes there?", "Shall I compare", "The moon", "My lord,"]


def lowered(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Server:
    """Commands whose first serves HTTP; ended for certain, ranks included."""

    def __init__(self, commands: list[list[str]], port: int, folder: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.url = f"http://127.0.0.1:{port}"
        self.logs = [folder / f"log-{index}" for index in range(len(commands))]
        self.commands = [
            subprocess.Popen(command, env=environment, stdout=open(log, "w"), stderr=subprocess.STDOUT)  # noqa: SIM115
            for command, log in zip(commands, self.logs, strict=True)
        ]

    def ranks(self, command: int) -> list[psutil.Process]:
        """Processes of ranks that descend from a command, oldest first."""
        family = psutil.Process(self.commands[command].pid).children(recursive=True)
        found = [one for one in family if "coterie.engine.process" in one.cmdline()]
        return sorted(found, key=lambda one: (one.create_time(), one.pid))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> tuple[int, str, dict[str, str]]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode(), lowered(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), lowered(error.headers)

    def text(self, prompt: str, max_tokens: int) -> str:
        status, body, _ = self.complete(prompt, max_tokens)
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["text"])

    def streamed(self, prompt: str, max_tokens: int) -> str:
        status, body, _ = self.complete(prompt, max_tokens, stream=True)
        assert status == 200, body
        events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith(f"coterie:{name}{{")]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else -1.0

    def until(self, condition: Any, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(log.read_text()[-3000:] for log in self.logs)
            time.sleep(0.05)


@contextmanager
def serving(commands: list[list[str]], port: int, folder: Path) -> Iterator[Server]:
    server = Server(commands, port, folder)
    family: list[psutil.Process] = []
    try:
        server.until(lambda: server.get("/ready")[0] == 200)
        yield server
        family = [
            child for command in server.commands for child in psutil.Process(command.pid).children(recursive=True)
        ]
        server.commands[0].terminate()
        for command in server.commands:
            command.wait(60)
        server.until(lambda: not any(one.is_running() and one.status() != "zombie" for one in family), 20)
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        for command in server.commands:
            command.kill()
            command.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_clients_see_nothing_of_a_lost_rank_but_a_pause(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "coterie", "serve", "--port", str(port), "--ep", "3", "--redundant-experts", "16"]
    with serving([[*command, *FLAGS]], port, tmp_path) as server, ThreadPoolExecutor(16) as pool:
        wanted = [server.text(prompt, 150) for prompt in PROMPTS]
        streams = [pool.submit(server.streamed, prompt, 150) for prompt in PROMPTS]
        server.until(lambda: server.metric("num_requests_running") == len(PROMPTS))
        server.ranks(0)[0].kill()
        refused = 0
        while not all(stream.done() for stream in streams):
            assert server.get("/health")[0] == 200
            status, body, headers = server.complete("x", 1)
            assert status in (200, 503), body
            if status == 503:
                refused += 1
                assert "recovering" in body and "rank" in body and int(headers["retry-after"]) >= 1
        assert [stream.result() for stream in streams] == wanted
        assert server.metric("ep_faults_total") == 1 and server.metric("ep_sequences_failed_total") == 0
        server.until(lambda: server.metric("ep_ranks_living") == 3)
        assert [server.text(prompt, 150) for prompt in PROMPTS] == wanted


def test_without_copies_the_server_waits_for_the_rank(tmp_path: Path) -> None:
    """503 before the first token or an error event in a stream, unless the rank is back in time; then it serves on."""
    port = free_port()
    command = [sys.executable, "-m", "coterie", "serve", "--port", str(port), "--ep", "2", *FLAGS]
    with serving([command], port, tmp_path) as server, ThreadPoolExecutor(8) as pool:
        wanted = [server.text(prompt, 450) for prompt in PROMPTS[:2]]
        whole = pool.submit(server.complete, PROMPTS[0], 450)
        stream = pool.submit(server.complete, PROMPTS[1], 450, stream=True)
        server.until(lambda: server.metric("num_requests_running") == 2)
        server.ranks(0)[1].kill()
        server.until(lambda: server.get("/ready")[0] == 503)
        ready, reason = server.get("/ready")
        assert ready == 200 or "16 slots are missing: 1 of 2 ranks" in reason
        assert server.get("/health")[0] == 200
        status, body, headers = whole.result()
        if status == 503:
            assert "rank_lost" in body and "on node 0 was lost" in body and int(headers["retry-after"]) >= 1
        else:
            assert json.loads(body)["choices"][0]["text"] == wanted[0]
        status, body, _ = stream.result()
        assert status == 200 and ("on node 0 was lost" in body or body.rstrip().endswith("[DONE]"))
        server.until(lambda: server.get("/ready")[0] == 200)
        assert server.text(PROMPTS[0], 450) == wanted[0]


def test_two_machines_under_torchrun(tmp_path: Path) -> None:
    """Both are this one here; a rank of the second is lost and started again by its own supervisor."""
    port, master = free_port(), free_port()
    commands = [
        [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(master),
            "-m", "coterie", "serve", "--port", str(port), "--redundant-experts", "12", *FLAGS,
        ]
        for node in range(2)
    ]  # fmt: skip
    with serving(commands, port, tmp_path) as server, ThreadPoolExecutor(8) as pool:
        wanted = [server.text(prompt, 100) for prompt in PROMPTS]
        assert server.metric("ep_ranks_living") == 4
        streams = [pool.submit(server.streamed, prompt, 100) for prompt in PROMPTS]
        server.until(lambda: server.metric("num_requests_running") == len(PROMPTS))
        server.ranks(1)[0].kill()
        assert [stream.result() for stream in streams] == wanted
        assert server.metric("ep_faults_total") == 1
        server.until(lambda: server.metric("ep_ranks_living") == 4)
        assert [server.text(prompt, 100) for prompt in PROMPTS] == wanted


def test_health_is_answered_while_experts_move(tmp_path: Path) -> None:
    """And each layer's balancedness is told."""
    port = free_port()
    moving = ["--redundant-experts", "8", "--rebalance-steps", "5"]
    command = [sys.executable, "-m", "coterie", "serve", "--port", str(port), "--ep", "2", *moving, *FLAGS]
    with serving([command], port, tmp_path) as server, ThreadPoolExecutor(8) as pool:
        wanted = server.text(PROMPTS[0], 300)
        streams = [pool.submit(server.streamed, PROMPTS[0], 300) for _ in range(4)]
        while not all(stream.done() for stream in streams):
            assert server.get("/health")[0] == 200
            time.sleep(0.05)
        assert [stream.result() for stream in streams] == [wanted] * 4
        server.until(lambda: server.metric("ep_experts_moved_total") > 0 and 'layer="1"' in server.get("/metrics")[1])
        lines = [line for line in server.get("/metrics")[1].splitlines() if "ep_layer_balancedness{" in line]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines]
        assert len(values) == 5 and all(0.5 <= value <= 1.0 for value in values), lines
        assert server.metric("ep_expert_moves_failed_total") == 0
