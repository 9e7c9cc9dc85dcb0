"""Two or more "hosts" (ep_net.py) that serve the shipped model together as torchrun starts them, and clients of theirs.

Each host has a network and process ids of its own, so nothing but the network joins them. `Hosts` starts and ends the
servers, finds the processes of ranks, and reads what the front end says; `Stream` is one answer to an `openai` client.
What is done to ranks and cables, and what is measured, is in ep_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import openai
import psutil
from ep_net import NetError, Network

PORT = 8000
MASTER_PORT = 29500
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A host sees no process of another; all of it ends with its first."""
READY_SECONDS = 180.0


class Hosts:
    """The servers of a network's hosts, `local` ranks each; the first has the front end. Always ended."""

    def __init__(self, network: Network, local: int, flags: Sequence[str], logs: Path) -> None:
        self.network, self.local, self.size = network, local, local * network.layout.hosts
        self.url = f"http://{network.subnet}.1:{PORT}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        network.uplink()
        self._flags = list(flags)
        self._logs = [logs / f"host-{host}.log" for host in range(network.layout.hosts)]
        self._servers = [self._start(host) for host in range(network.layout.hosts)]

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with self._logs[host].open("a") as log:
            command = self._command(host, self._flags)
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _command(self, host: int, flags: Sequence[str]) -> list[str]:
        network = self.network
        torchrun = [
            *("--nnodes", str(network.layout.hosts), "--node-rank", str(host), "--nproc-per-node", str(self.local)),
            *("--master-addr", f"{network.subnet}.1", "--master-port", str(MASTER_PORT)),
        ]
        serve = ["-m", "coterie", "serve", "--host", "0.0.0.0", "--port", str(PORT), *flags]
        inside = [*network.inside(network.host(host)), *OWN_PROCESSES]
        return [*inside, sys.executable, "-m", "torch.distributed.run", *torchrun, *serve]

    def __enter__(self) -> Hosts:
        try:
            self.until(lambda: self.get("/ready")[0] == 200, "ready", READY_SECONDS)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def stop(self, seconds: float = 60.0) -> list[int]:
        """End in order: the front end is told, and all torchruns come to their end. Returns their exit statuses."""
        for process in self._family(0):
            if process.environ().get("RANK") == "0" and "serve" in process.cmdline():
                process.terminate()
        return [server.wait(seconds) for server in self._servers]

    def end(self) -> None:
        """Kill every process."""
        for server in self._servers:
            server.kill()
        for server in self._servers:
            server.wait()

    def power(self, host: int, *, on: bool) -> None:
        """Let a host fall silent, as without power, or start it and its part of the server again."""
        self.network.cable(host, plugged=on)
        if on:
            self._servers[host] = self._start(host)
        else:
            self._servers[host].kill()
            self._servers[host].wait()

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank. Raises NetError if it has none now."""
        for process in self._family(number // self.local):
            if "coterie.engine.process" in process.cmdline() and process.environ().get("RANK") == str(number):
                return process
        raise NetError(f"rank {number} has no process")

    def _family(self, host: int) -> list[psutil.Process]:
        """A host's processes whose command can be read: those that have not just ended."""
        found = []
        for process in psutil.Process(self._servers[host].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.cmdline(), process.environ()
                found.append(process)
        return found

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 with the reason if there is no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metrics(self) -> dict[str, float]:
        """Numbers of `/metrics` that have no labels of ranks, by name without the prefix."""
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("coterie:") and "rank=" not in name and "le=" not in name:
                found[name.removeprefix("coterie:").partition("{")[0]] = float(value)
        return found

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
        """Wait; returns the moment. Raises NetError with the ends of the logs if it takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise NetError(f"not {what} within {seconds:g} s\n{self.said()}")
            time.sleep(0.02)
        return time.monotonic()

    def said(self, size: int = 4000) -> str:
        """The ends of the hosts' logs."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-size:]}" for log in self._logs)


@dataclass(slots=True)
class Stream:
    """One streamed answer as its client gets it. `times`: when each piece of text came; `error`: why it ended early."""

    prompt: str
    max_tokens: int
    text: str = ""
    error: str = ""
    begun: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)

    def run(self, client: openai.OpenAI) -> Stream:
        """Ask and read to the end."""
        self.begun = time.monotonic()
        try:
            answer = client.completions.create(
                model="demo", prompt=self.prompt, max_tokens=self.max_tokens, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in answer:
                if chunk.choices and chunk.choices[0].text:
                    self.text += chunk.choices[0].text
                    self.times.append(time.monotonic())
        except openai.APIError as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = time.monotonic()
        return self

    def pause(self, moment: float) -> float:
        """Seconds from a moment to the next piece of text; 0 if none came since."""
        return next((at - moment for at in self.times if at >= moment), 0.0)
