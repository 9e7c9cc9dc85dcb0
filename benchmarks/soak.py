"""Soak: mixed traffic on a real server on loopback for a while, then every book must balance.

    python benchmarks/soak.py                      # 30 minutes
    python benchmarks/soak.py --minutes 10 --rate 3

`coterie serve` runs with a small cache and a short queue, so that preemption and overload happen. Clients stream or do
not, share prefixes, send long prompts, ask for JSON by schema, hang up and send what must be refused
(`soak_traffic.py`); bursts fill the queue. At the end: every request had an end that its kind allows, greedy answers
never changed, /metrics adds up with what the clients saw, no cache block, connection or thread is left, memory is
flat, and the server ends cleanly. Prints a table; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from soak_traffic import HANG_UP_TOKENS, Ledger, Traffic

from coterie.cli.common import plain_table
from coterie.loadgen.client import CHAT, TEXT, Client
from coterie.loadgen.connection import Address
from coterie.loadgen.prompts import SHIPPED_TEXT

CONTEXT = 512
SERVER = ["--max-running-requests", "8", "--max-queued-requests", "16", "--kv-cache-tokens", "640", "--page-size", "16",
          "--max-model-len", str(CONTEXT), "--chunked-prefill-size", "64"]  # fmt: skip
BURST, BURST_SECONDS = 60, 20.0
"""Requests at once, and how often, to fill the queue."""
LAST_SECONDS = 120.0
"""Requests that have no end so long after the last arrival are lost."""
GROWTH_SHARE, GROWTH_BYTES = 0.03, 8e6
"""Resident memory may grow by the larger of these over the last two thirds of a run (fitted line)."""


@dataclass(slots=True)
class Body:
    """What was seen of the server's process: (seconds, resident bytes) and descriptors and threads, first and last."""

    memory: list[tuple[float, float]] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, process: psutil.Process, at: float) -> None:
        self.memory.append((at, process.memory_info().rss))
        self.files.append(process.num_fds())
        self.threads.append(process.num_threads())

    def growth(self) -> float:
        """Bytes that a line through the last two thirds rises."""
        kept = np.array(self.memory[len(self.memory) // 3 :])
        if len(kept) < 3:
            return 0.0
        slope = np.polyfit(kept[:, 0], kept[:, 1], 1)[0]
        return float(slope * (kept[-1, 0] - kept[0, 0]))


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    what: str
    holds: bool
    figures: str


class Counters:
    """A scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                self.values[name.removeprefix("coterie:")] = float(value)

    def get(self, stem: str) -> float:
        """A series that has the model's label only; 0 if it is not there."""
        found = [
            value for name, value in self.values.items() if re.fullmatch(stem + r'(\{model_name="[^"]*"\})?', name)
        ]
        return found[0] if found else 0.0

    def reason(self, reason: str) -> int:
        """Ended requests."""
        ends = f'finished_reason="{reason}"'
        return int(
            sum(v for name, v in self.values.items() if name.startswith("request_success_total") and ends in name)
        )

    def answers(self, path: str) -> Counter[int]:
        """HTTP answers of a route by status."""
        found: Counter[int] = Counter()
        for name, value in self.values.items():
            match = re.fullmatch(r'http_requests_total\{path="([^"]*)",status="(\d+)"\}', name)
            if match and match[1] == path:
                found[int(match[2])] = int(value)
        return found


def counter_checks(ledger: Ledger, now: Counters) -> Iterator[Check]:
    """Do the server's counters say what the clients saw?"""
    for path in (TEXT, CHAT):
        seen = Counter({status: n for (where, status), n in ledger.statuses.items() if where == path})
        told = now.answers(path)
        extra = told - seen
        hidden = sum(extra.values()) == ledger.hidden[path] and set(extra) <= {200, 429, 499}
        yield Check(f"http_requests_total of {path}", hidden and not seen - told,
                    f"{dict(sorted(told.items()))}, {ledger.hidden[path]} unseen")  # fmt: skip
    reasons = {reason: now.reason(reason) for reason in ("stop", "length", "abort", "error")}
    ended, whole = sum(reasons.values()), sum(ledger.whole.values())
    unseen = ended - whole - ledger.streams_left
    left = ledger.streams_left + unseen
    beyond = reasons["stop"] - ledger.reasons["stop"] + reasons["length"] - ledger.reasons["length"] + reasons["abort"]
    fits = 0 <= unseen <= sum(ledger.hidden.values()) and beyond == left and not reasons["error"]
    more = all(reasons[reason] >= ledger.reasons[reason] for reason in ("stop", "length"))
    yield Check("request_success_total", fits and more, f"{reasons}; whole answers {dict(ledger.reasons)}, {left} left")
    prompt = int(now.get("prompt_tokens_total"))
    known = ledger.prompt_tokens + ledger.seen_prompt
    yield Check("prompt_tokens_total", prompt - known == HANG_UP_TOKENS * unseen,
                f"{prompt} = {known} seen + {HANG_UP_TOKENS} x {unseen}")  # fmt: skip
    output = int(now.get("generation_tokens_total"))
    least = ledger.output_tokens + ledger.seen_output
    yield Check("generation_tokens_total", least <= output <= least + ledger.may_follow,
                f"{output}, seen {least}, at most {ledger.may_follow} after hang-ups")  # fmt: skip
    sums = all(
        now.get(f"request_{kind}_tokens_sum") == now.get(f"{kind}_tokens_total") for kind in ("prompt", "generation")
    )
    counts = {stem: int(now.get(f"{stem}_count")) for stem in ("e2e_request_latency_seconds", "request_prompt_tokens",
                                                               "time_to_first_token_seconds")}  # fmt: skip
    firsts = whole <= counts.pop("time_to_first_token_seconds") <= ended
    yield Check("histograms", sums and firsts and set(counts.values()) == {ended}, f"{ended} requests in each")


def checks(ledger: Ledger, lost: int, now: Counters, body: Body, ending: tuple[int, str]) -> Iterator[Check]:
    """Everything that must hold at the end."""
    ends = sum((ledger.whole + ledger.refused + ledger.hung_up).values()) + len(ledger.unexpected)
    yield Check("no request lost", lost == 0 and ends >= sum(ledger.sent.values()), f"{sum(ledger.sent.values())} sent")
    yield Check("no unexpected end", not ledger.unexpected, "; ".join(ledger.unexpected[:3]) or "none")
    yield from counter_checks(ledger, now)
    gauges = {stem: now.get(stem) for stem in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
    preempted, steps = int(now.get("num_preemptions_total")), int(now.get("engine_steps_total"))
    yield Check(
        "no block and no request left",
        not any(gauges.values()),
        f"{steps} steps, {preempted} preemptions, {now.get('prefix_cache_hits_total'):.0f} tokens found cached",
    )
    full = sum(n for (_, status), n in ledger.statuses.items() if status == 429)
    yield Check("the queue was full at times", full > 0, f"{full} x 429")
    first, last = (body.memory[at][1] / 1e6 for at in (len(body.memory) // 3, -1))
    yield Check(
        "memory is flat",
        body.growth() <= max(1e6 * GROWTH_SHARE * first, GROWTH_BYTES),
        f"{first:.1f} MB after a third, {last:.1f} MB at the end, line {body.growth() / 1e6:+.2f} MB",
    )
    few = body.files[-1] <= body.files[0] + 2 and body.threads[-1] <= body.threads[0] + 8
    yield Check(
        "descriptors and threads",
        few,
        f"{body.files[0]} to {body.files[-1]} (most {max(body.files)}), {body.threads[0]} to {body.threads[-1]}",
    )
    code, said = ending
    yield Check("the server ended cleanly", code == 0 and not said, said or "exit code 0, no error in its log")


@contextmanager
def running_server(model: str | None, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`coterie serve` on a free port; ended at the latest here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "coterie", "serve", *([model] if model else []), "--port", str(port), *SERVER]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.poll() is None:
                process.kill()


async def scrape(client: Client) -> Counters:
    """Read /metrics."""
    status, body = await client.ask("GET", "/metrics")
    assert status == 200, body
    return Counters(body.decode())


async def settle(client: Client) -> Counters:
    """Counters once nothing runs any more, or after ten seconds."""
    for _ in range(50):
        now = await scrape(client)
        if not now.get("num_requests_running") + now.get("num_requests_waiting") + now.get("kv_cache_usage_perc"):
            break
        await asyncio.sleep(0.2)
    return now


async def soak(url: str, process: psutil.Process, arguments: argparse.Namespace, console: Console) -> tuple[
    Ledger, int, Counters, Body
]:  # fmt: skip
    """Send until time is up, wait for the rest; (ledger, lost requests, counters at the end, the process)."""
    client = Client(Address.parse(url))
    for _ in range(600):
        try:
            if (await client.ask("GET", "/ready"))[0] == 200:
                break
        except OSError:
            assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, "the server did not start"
        await asyncio.sleep(0.1)
    traffic = Traffic(client, SHIPPED_TEXT.read_text(), CONTEXT, arguments.seed)
    for kind in traffic.kinds:  # first of all one of each: what is made once is made before anything is measured
        await traffic.send(kind)
    body, tasks = Body(), set[asyncio.Task[None]]()
    gaps = random.Random(arguments.seed + 1)
    begin = time.monotonic()
    end, next_look, next_burst = begin + 60 * arguments.minutes, begin, begin + BURST_SECONDS / 4
    while (now := time.monotonic()) < end:
        if now >= next_look:
            body.look(process, now - begin)
            next_look = now + max(1.0, arguments.minutes)
            console.print(
                f"{now - begin:5.0f} s: {sum(traffic.ledger.sent.values())} sent, {len(tasks)} open, "
                f"{len(traffic.ledger.unexpected)} unexpected, {body.memory[-1][1] / 1e6:.1f} MB"
            )
        count = 1
        if now >= next_burst:
            count, next_burst = BURST, now + BURST_SECONDS
        for _ in range(count):
            task = asyncio.create_task(traffic.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(gaps.expovariate(arguments.rate))
    lost = 0
    if tasks:
        _, left = await asyncio.wait(set(tasks), timeout=LAST_SECONDS)
        lost = len(left)
    counters = await settle(client)
    client.pool.close()
    await asyncio.sleep(0.5)
    body.look(process, time.monotonic() - begin)
    return traffic.ledger, lost, counters, body


def finish(process: subprocess.Popen[bytes], log: Path) -> tuple[int, str]:
    """End the server as an operator would; its exit code and what its log should not hold."""
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(30)
    except subprocess.TimeoutExpired:
        return -1, "it did not end within 30 s of SIGTERM"
    bad = [line for line in log.read_text(errors="replace").splitlines() if "Traceback" in line or "ERROR" in line]
    return code, "; ".join(bad[:3])[:300] or ("" if code == 0 else f"exit code {code}")


def show(ledger: Ledger, found: list[Check], seconds: float) -> None:
    """Both tables."""
    console = Console(highlight=False, soft_wrap=True)
    table = plain_table("kind", "sent", "whole", "refused", "hung up")
    for kind in sorted(ledger.sent):
        row = (ledger.sent, ledger.whole, ledger.refused, ledger.hung_up)
        table.add_row(kind, *(str(counter[kind]) for counter in row))
    console.print(table)
    for check in found:
        console.print(f"{'ok    ' if check.holds else 'FAILED'} {check.what}: {check.figures}")
    failed = sum(not check.holds for check in found)
    console.print(f"{sum(ledger.sent.values())} requests in {seconds / 60:.1f} minutes; {failed} checks failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second, bursts left out")
    parser.add_argument("--model", help="folder; the shipped model by default")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not (math.isfinite(arguments.minutes) and arguments.minutes > 0 and arguments.rate > 0):
        parser.error("--minutes and --rate are positive numbers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server would stay
    console = Console(stderr=True, highlight=False)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running_server(arguments.model, log) as (url, process):
            body = asyncio.run(soak(url, psutil.Process(process.pid), arguments, console))
            found = list(checks(*body, finish(process, log)))
    show(body[0], found, time.monotonic() - begin)
    sys.exit(0 if all(check.holds for check in found) else 1)


if __name__ == "__main__":
    main()
