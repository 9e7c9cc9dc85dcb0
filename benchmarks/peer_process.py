"""Fleet: worker processes that share one machine. Only the one that is asked runs; the others are stopped by signal.

A worker and its children are one process group, stopped as a whole, so that an engine whose idle threads spin costs the
others nothing. Workers stay loaded while their memory fits; the one asked longest ago is ended first.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_LOADED = "cannot be loaded"
"""How errors of starting an engine begin."""


class PeerError(Exception):
    """An engine failed, died or took too long; the message says which."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How to start an engine and what to load. `memory`: bytes it is expected to need. Its own words go to `log`."""

    name: str
    command: list[str]
    load: dict[str, Any]
    memory: int
    log: Path


@dataclass(slots=True)
class Running:
    """A started worker. `memory`: what it was seen to need; `asked`: when, to find the one to end."""

    process: subprocess.Popen[bytes]
    memory: int
    asked: float
    loaded: dict[str, Any]


class Fleet:
    """Workers by name. `memory`: bytes that they may take together."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.peers: dict[str, Peer] = {}
        self.running: dict[str, Running] = {}
        self._loads: dict[str, dict[str, Any]] = {}

    def add(self, peer: Peer) -> None:
        self.peers[peer.name] = peer

    def loaded(self, name: str) -> dict[str, Any] | None:
        """What the worker said when it loaded, the last time it did."""
        return self._loads.get(name)

    def need(self, name: str) -> int:
        """Bytes that a worker takes: as seen when it last ran, or as expected."""
        if name in self.running:
            return self.running[name].memory
        return int(self._loads[name]["rss"]) if name in self._loads else self.peers[name].memory

    def fits(self, names: list[str]) -> bool:
        """Whether these can be loaded at the same time."""
        return sum(self.need(name) for name in names) <= self.memory

    def ask(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One measurement, with only this worker awake. Raises `PeerError`; a worker that failed is ended."""
        if name not in self.running:
            self._start(name, timeout)
        running = self.running[name]
        running.asked = time.monotonic()
        send_signal(running.process, signal.SIGCONT)
        try:
            answer = exchange(running.process, request, timeout)
        except PeerError:
            self._end(name)
            raise
        send_signal(running.process, signal.SIGSTOP)
        running.memory = max(running.memory, int(answer["rss"]))
        return answer

    def rest(self) -> None:
        """Stop everyone."""
        for running in self.running.values():
            send_signal(running.process, signal.SIGSTOP)

    def end(self) -> None:
        """End everyone."""
        for name in list(self.running):
            self._end(name)

    def _start(self, name: str, timeout: float) -> None:
        peer = self.peers[name]
        need = self.need(name)
        while self.running and sum(other.memory for other in self.running.values()) + need > self.memory:
            self._end(min(self.running, key=lambda other: self.running[other].asked))
        if need > self.memory:
            raise PeerError(f"{NOT_LOADED}: needs {need / 1e9:.1f} GB of memory, {self.memory / 1e9:.1f} GB can be had")
        self.rest()
        with peer.log.open("ab") as log:
            process = subprocess.Popen(peer.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                       start_new_session=True)  # fmt: skip
        self.running[name] = Running(process, need, time.monotonic(), {})
        try:
            answer = exchange(process, peer.load, timeout)
        except PeerError as error:
            self._end(name)
            raise PeerError(f"{NOT_LOADED}: {error}") from error
        self._loads[name] = self.running[name].loaded = answer
        self.running[name].memory = int(answer["rss"])

    def _end(self, name: str) -> None:
        """Let a worker leave by itself, or kill its group."""
        process = self.running.pop(name).process
        send_signal(process, signal.SIGCONT)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            send_signal(process, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def send_signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the worker's whole group, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def exchange(process: subprocess.Popen[bytes], request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a request and wait for its answer. Raises `PeerError` for an error, an end or silence."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise PeerError(f"its process ended with {process.wait()}; its log says why") from error
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    if not ready:
        send_signal(process, signal.SIGKILL)
        raise PeerError(f"took more than {timeout:g} s")
    line = process.stdout.readline()
    if not line:
        raise PeerError(f"its process ended with {process.wait()}; its log says why")
    answer = json.loads(line)
    if "error" in answer:
        raise PeerError(answer["error"])
    return dict(answer)
