"""What the HTTP path alone sustains: streamed tokens a second through the real server with an engine that only talks.

    python benchmarks/http_path.py [--streams 1,16,64] [--seconds 3] [--rounds 3] [--endpoint chat]

The server process is the one that serves (uvicorn, routes, front end, detokeniser, metrics, event streams) with the
shipped tokenizer; its engine gives every running sequence one token a step and begins the next step when the event loop
has taken the last one, so nothing is computed and news never pile up. The client is another process that only counts
events. Printed: tokens a second and the server's processor time a token, medians and ranges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from coterie.cli.common import plain_table
from coterie.engine.build import EngineInfo, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.engine.messages import Abort, Add, Drain, FromEngine, Output, ToEngine
from coterie.engine.worker import EngineLink
from coterie.loadgen.client import CHAT, TEXT, Client, Prompt, Record
from coterie.loadgen.connection import Address, Head, Sink
from coterie.model.shipped import shipped_model_path
from coterie.server.config import ServerConfig
from coterie.server.run import serve

WORDS = "the king shall have his crown again and all the court rejoice "
MAX_TOKENS = 1_000_000


class TalkingEngine:
    """A thread that answers Adds with the same text over and over, one token of every sequence a step."""

    def __init__(self, engine: AsyncEngine, token_ids: list[int]) -> None:
        self._engine, self._text = engine, token_ids
        self._deliver, self._closed = engine.callbacks()
        self._inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._taken = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> EngineLink:
        self._thread.start()
        return EngineLink(self._inbox.put, self._thread.join, lambda: None)

    def _run(self) -> None:
        running: dict[str, tuple[int, int]] = {}  # tokens said and to say
        while self._read(running):
            news: list[FromEngine] = []
            for name, (said, wanted) in list(running.items()):
                reason: Any = "length" if said + 1 == wanted else None
                prefill = 0.0 if said == 0 else None
                token = self._text[said % len(self._text)]
                news.append(Output(name, [token], finish_reason=reason, prefill_seconds=prefill))
                running[name] = (said + 1, wanted)
                if reason is not None:
                    del running[name]
            self._deliver(news)
            self._wait_until_taken()
        self._closed(None)

    def _wait_until_taken(self) -> None:
        """The loop runs callbacks in turn: when this one runs, it has taken the step's news."""
        loop = self._engine._loop
        assert loop is not None
        self._taken.clear()
        loop.call_soon_threadsafe(self._taken.set)
        self._taken.wait()

    def _read(self, running: dict[str, tuple[int, int]]) -> bool:
        while True:
            try:
                message = self._inbox.get_nowait() if running else self._inbox.get()
            except Empty:
                return True
            match message:
                case Add():
                    running[message.request_id] = (0, message.params.max_tokens or 1)
                case Abort():
                    running.pop(message.request_id, None)
                case Drain():
                    return False


def serve_talk() -> None:
    """The server process: prints its URL, serves until it is ended."""
    files = open_model(shipped_model_path())
    assert files.tokenizer is not None
    info = EngineInfo(files, EngineConfig(max_running_requests=1024), MAX_TOKENS + 1024, ())
    engine = AsyncEngine(info, "talk")
    engine.connect(TalkingEngine(engine, files.tokenizer.encode(WORDS, add_special_tokens=False)).start())
    serve(lambda observer: engine, ServerConfig(port=0, stats_log_seconds=0), lambda url: print(url, flush=True))


@dataclass(frozen=True, slots=True)
class Shot:
    """One measurement: events and bytes that came in `seconds`, and the server's processor seconds meanwhile, its own
    and the system's for it."""

    streams: int
    events: int
    received: int
    seconds: float
    user: float
    system: float

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    def micros(self, seconds: float) -> float:
        """Microseconds a token."""
        return 1e6 * seconds / self.events


class Counter:
    """Counts events of all streams; the cheapest client there is."""

    def __init__(self) -> None:
        self.events = self.received = 0

    def choose(self, head: Head) -> Sink:
        assert head.status == 200, head
        return self._take

    def _take(self, piece: bytes, stamp: float) -> None:
        self.events += piece.count(b"\n\n")
        self.received += len(piece)


async def measure(url: str, endpoint: str, streams: int, seconds: float, process: psutil.Process) -> Shot:
    """Open streams, let them run in, count for a while, hang up."""
    client = Client(Address.parse(url), endpoint=endpoint, extra={"ignore_eos": True})
    counter = Counter()
    body = client.body(Prompt("who goes there", MAX_TOKENS))
    tasks = [asyncio.create_task(client.pool.request("POST", endpoint, body, counter.choose)) for _ in range(streams)]
    while counter.events < 10 * streams:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    before, events, received, begin = process.cpu_times(), counter.events, counter.received, time.monotonic()
    await asyncio.sleep(seconds)
    after, end = process.cpu_times(), time.monotonic()
    shot = Shot(streams, counter.events - events, counter.received - received, end - begin,
                after.user - before.user, after.system - before.system)  # fmt: skip
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.2)
    return shot


async def check(url: str, endpoint: str) -> None:
    """One whole answer is what the engine said."""
    client, record = Client(Address.parse(url), endpoint=endpoint, extra={"ignore_eos": True}), Record(0, 0.0)
    await client.stream(Prompt("who goes there", 60), record)
    assert record.ok and record.output_tokens == 60, record
    assert record.text.startswith(WORDS[:30].strip()) or record.text.strip().startswith(WORDS[:30].strip()), record.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,16,64", help="numbers of streams, with commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", choices=["chat", "text"], default="chat")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--server", action="store_true", help="be the server process")
    arguments = parser.parse_args()
    if arguments.server:
        serve_talk()
        return
    endpoint = CHAT if arguments.endpoint == "chat" else TEXT
    command = [sys.executable, __file__, "--server"]
    shots: deque[Shot] = deque()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            process = psutil.Process(server.pid)
            asyncio.run(check(url, endpoint))
            for _ in range(arguments.rounds):
                for streams in map(int, arguments.streams.split(",")):
                    shots.append(asyncio.run(measure(url, endpoint, streams, arguments.seconds, process)))
        finally:
            server.terminate()
    if arguments.json:
        print(json.dumps([{**{n: getattr(s, n) for n in s.__slots__}, "rate": s.rate} for s in shots]))
        return
    show(list(shots))


def show(shots: list[Shot]) -> None:
    """The table."""
    from rich.console import Console

    table = plain_table("streams", "tokens/s", "range", "server µs a token", "in the system", "bytes a token")
    for streams in sorted({shot.streams for shot in shots}):
        own = [shot for shot in shots if shot.streams == streams]
        rates = [shot.rate for shot in own]
        table.add_row(
            str(streams), f"{statistics.median(rates):.0f}", f"{min(rates):.0f} .. {max(rates):.0f}",
            f"{statistics.median(shot.micros(shot.user + shot.system) for shot in own):.1f}",
            f"{statistics.median(shot.micros(shot.system) for shot in own):.1f}",
            f"{statistics.median(shot.received / shot.events for shot in own):.0f}",
        )  # fmt: skip
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
