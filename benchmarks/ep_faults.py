"""Lost ranks, hung ranks and cut cables between "hosts" that serve the shipped model, with streams in flight.

    python benchmarks/ep_faults.py [--fault kill:0] [--fault hang:3] [--fault cut:1] [--fault off:1] [--rounds 1]

Hosts are network namespaces with process ids of their own (ep_hosts.py; root). Each round starts the servers anew and
does every fault: kill:R and hang:R send a rank SIGKILL and SIGSTOP; cut:H takes the cable of a host out for --hold
seconds; off:H ends all of a host besides and starts it again. Times count from the fault: `known` until /ready refuses,
`serving` until it does not, `pause` until the slowest stream that was in flight goes on; `back` from the fault (cut and
off: from the cable) until all ranks serve. Every answer is compared with that of one rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ep import Shape
from ep_hosts import Hosts, Stream
from ep_net import Layout, NetError, Network
from rich.console import Console
from rich.table import Table

from coterie.engine.llm import LLM
from coterie.engine.messages import SamplingParams

FAULTS = ("kill:0", "kill:3", "hang:1", "hang:2", "cut:1", "off:1")
PROMPTS = ("To be, or not", "Now is the winter", "Who goes there?", "Shall I compare", "The moon", "My lord,")
FLAGS = ("--redundant-experts", "32", "--kv-cache-tokens", "8192", "--max-model-len", "512", "--threads", "1")
"""Two of four ranks may be lost."""
BEGUN = 20
"""Pieces of text that every stream has before a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done, and how it is undone after `hold` seconds (None: it is not, ranks come back by themselves)."""

    name: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None
    hold: float = 0.0

    @classmethod
    def parse(cls, text: str, hosts: Hosts, hold: float) -> Fault:
        """kill:R, hang:R, cut:H or off:H. Exits for anything else."""
        kind, _, number = text.partition(":")
        index, network = int(number), hosts.network
        if kind == "kill":
            return cls(text, lambda: hosts.rank(index).kill())
        if kind == "hang":
            return cls(text, lambda: hosts.rank(index).suspend())
        if kind == "cut":
            plug = network.cable
            return cls(text, lambda: plug(index, plugged=False), lambda: plug(index, plugged=True), hold)
        if kind == "off":
            return cls(text, lambda: hosts.power(index, on=False), lambda: hosts.power(index, on=True), hold)
        raise SystemExit(f"{text}: kill, hang, cut or off, and the number of a rank or host")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds as above; the streams, how many of them ended with one rank's text, and how many said why they did not.

    `last_error`: when the last of these ended, after the fault; 0 if there is none. `unhealthy`: answers of /health
    other than 200.
    """

    fault: str
    known: float
    serving: float
    pause: float
    back: float
    streams: tuple[Stream, ...]
    right: int
    last_error: float
    unhealthy: int

    @property
    def errors(self) -> int:
        return sum(bool(stream.error) for stream in self.streams)

    @property
    def wrong(self) -> int:
        return len(self.streams) - self.right - self.errors


def texts_of_one_rank(max_tokens: int) -> list[str]:
    """What a single rank answers."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(threads=1, max_model_len=512, kv_cache_tokens=8192) as llm:
        return [output.outputs[0].text for output in llm.generate(list(PROMPTS), params)]


def drill(hosts: Hosts, fault: Fault, wanted: Sequence[str], max_tokens: int) -> Outcome:
    """Do one fault under streams. Raises NetError if the service or the ranks do not come back."""
    unhealthy = 0

    def ready() -> bool:
        nonlocal unhealthy
        unhealthy += hosts.get("/health")[0] != 200
        return hosts.get("/ready")[0] == 200

    streams = [Stream(prompt, max_tokens) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = [pool.submit(stream.run, hosts.client) for stream in streams]
        hosts.until(lambda: all(len(stream.times) >= BEGUN or stream.error for stream in streams), "streaming")
        began = time.monotonic()
        fault.do()
        known = hosts.until(lambda: not ready(), f"aware of {fault.name}", 10.0)
        serving = hosts.until(ready, f"serving after {fault.name}")
        undone = began
        if fault.undo is not None:
            time.sleep(max(0.0, began + fault.hold - time.monotonic()))
            undone = time.monotonic()
            fault.undo()
        back = hosts.until(lambda: hosts.metrics().get("ep_ranks_living") == hosts.size, "whole again", 120.0)
        for answer in answers:
            answer.result()
    return Outcome(
        fault=fault.name,
        known=known - began,
        serving=serving - began,
        pause=max(stream.pause(began) for stream in streams),
        back=back - undone,
        streams=tuple(streams),
        right=sum(not one.error and one.text == text for one, text in zip(streams, wanted, strict=True)),
        last_error=max([stream.ended - began for stream in streams if stream.error], default=0.0),
        unhealthy=unhealthy,
    )


def spread(values: Sequence[float]) -> str:
    """Median, and the range of several."""
    text = f"{statistics.median(values):.2f}"
    return text if len(values) == 1 else f"{text} ({min(values):.2f} to {max(values):.2f})"


def report(console: Console, title: str, outcomes: Sequence[Outcome]) -> None:
    """One row for each kind of fault."""
    names = ("fault", "times", "known, s", "serving, s", "pause, s", "back, s", "streams", "right", "error", "wrong")
    table = Table(*names, title=title, title_justify="left")
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        some = [outcome for outcome in outcomes if outcome.fault == name]
        times = [spread([getattr(one, field) for one in some]) for field in ("known", "serving", "pause", "back")]
        num_streams = sum(len(one.streams) for one in some)
        counts = [num_streams, *(sum(getattr(one, field) for one in some) for field in ("right", "errors", "wrong"))]
        table.add_row(name, str(len(some)), *times, *map(str, counts))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(1, 2, 2))
    parser.add_argument("--fault", action="append")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--hold", type=float, default=5.0, help="seconds for which a cable is out")
    args = parser.parse_args()
    console, shape = Console(width=150), args.shape
    wanted = texts_of_one_rank(args.tokens)
    outcomes: list[Outcome] = []
    try:
        for _ in range(args.rounds):
            with (
                Network(Layout(shape.hosts, shape.racks)) as network,
                tempfile.TemporaryDirectory() as logs,
                Hosts(network, shape.local, FLAGS, Path(logs)) as hosts,
            ):
                for text in args.fault or FAULTS:
                    outcomes.append(drill(hosts, Fault.parse(text, hosts, args.hold), wanted, args.tokens))
    except NetError as error:
        sys.exit(f"ep_faults.py cannot go on: {error}")
    finally:
        if outcomes:
            report(console, f"{shape}, {len(PROMPTS)} streams of {args.tokens} tokens", outcomes)
    for outcome in outcomes:
        for stream in outcome.streams:
            if stream.error:
                console.print(f"{outcome.fault}: {stream.error}")
    if any(outcome.wrong for outcome in outcomes):
        sys.exit("answers differ from those of one rank")


if __name__ == "__main__":
    main()
