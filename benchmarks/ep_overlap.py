"""Two-batch overlap between "hosts" on a slow link: how much of the smaller of compute and communication is hidden.

    python benchmarks/ep_overlap.py [--shape 2x2] [--mbit 200] [--out int8] [--back bfloat16] [--trace FILE]

Ranks run a stack of MoE layers (ep_stack.py) over the exchange, in hosts that are network namespaces (ep_net.py; root).
Measured in turns within one process: communication alone, compute alone, two micro-batches one after the other, and in
turns. Rows go out as the engine sends them to experts of integers (int8 with a factor per 32 values) or as float32, and
come back as float32 or bf16. `hidden` is (sequence - overlap) / min(comm, compute) of the whole step; `inner` is the
same of what a third of the layers lacks to all of them, which leaves the step's two ends out; `under compute` is taken
from the trace of one overlapped step. Sleeping compute stands for a device that leaves the host idle; real compute
shares the host's cores with the exchange and with all other ranks of this machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep import Ranks, Shape
from ep_net import Layout, NetError, Network
from rich.console import Console
from rich.table import Table

from coterie.observe.trace import write_chrome

TIMES = ("comm", "compute", "sequence", "overlap")


@dataclass(frozen=True, slots=True)
class Case:
    """Compute of a layer and micro-batch: `seconds` asleep, or real (None)."""

    seconds: float | None
    mbit: float

    @property
    def name(self) -> str:
        compute = "real products" if self.seconds is None else f"{self.seconds * 1e3:g} ms asleep"
        return f"{compute}, {f'{self.mbit:g} Mbit/s' if self.mbit else 'unlimited'}"


Round = dict[str, float]
"""Seconds of each of TIMES."""


@dataclass(frozen=True, slots=True)
class Result:
    """Rounds of the whole stack and of a third of it, each as slow as its slowest rank; share of the communication that
    a trace shows under compute."""

    rounds: list[Round]
    third: list[Round]
    covered: float

    def median(self, name: str) -> float:
        """Of the rounds' times."""
        return statistics.median(r[name] for r in self.rounds)

    @property
    def hidden(self) -> float:
        """The median of the rounds' own shares."""
        return statistics.median(share(r) for r in self.rounds)

    @property
    def inner(self) -> float:
        """Of the layers that the short stack lacks."""
        pairs = zip(self.rounds, self.third, strict=True)
        return statistics.median(share({name: r[name] - t[name] for name in TIMES}) for r, t in pairs)


def share(times: Round) -> float:
    """Of the smaller of communication and compute, what took no time."""
    return (times["sequence"] - times["overlap"]) / min(times["comm"], times["compute"])


def rounds_of(answers: list[dict[str, Any]]) -> list[Round]:
    """From the ranks' answers."""
    count = len(answers[0]["comm"])
    return [{name: max(answer[name][index] for answer in answers) for name in TIMES} for index in range(count)]


def measure(ranks: Ranks, case: Case, args: argparse.Namespace) -> Result:
    """All rounds of one case; writes its trace if one is asked for."""
    ranks.network.limit(case.mbit or None)
    request = {"op": "overlap", "form": "flat", "compute": "real" if case.seconds is None else "sleep",
               "seconds": case.seconds or 0.0, "tokens": args.tokens, "layers": args.layers, "inner": args.inner,
               "repeats": args.repeats, "rounds": args.rounds, "hidden": args.hidden, "top_k": args.top_k,
               "out": args.out, "back": args.back, "trace": args.trace is not None}  # fmt: skip
    third = ranks.all({**request, "layers": max(args.layers // 3, 1), "trace": False})
    answers = ranks.all(request)
    if args.trace is not None:
        events = [event for answer in answers for event in answer["trace"]]
        path = args.trace.with_stem(
            f"{args.trace.stem}-{case.name.replace(' ', '-').replace('/', '').replace(',', '')}"
        )
        write_chrome(path, events)
    covered = statistics.mean(answer["hidden"] for answer in answers)
    return Result(rounds_of(answers), rounds_of(third), covered)


def table(shape: Shape, results: dict[Case, Result], args: argparse.Namespace) -> Table:
    """Milliseconds of a step and the shares."""
    title = (
        f"{shape}, {args.layers} layers, 2 x {args.tokens // 2} tokens a rank, {args.rounds} rounds, "
        f"{args.out} out, {args.back} back"
    )
    grid = Table(title=title, title_justify="left")
    for head in ("compute, link", *TIMES, "speed-up", "hidden", "inner", "under compute"):
        grid.add_column(head, justify="left" if head == "compute, link" else "right")
    for case, result in results.items():
        times = [f"{result.median(name) * 1e3:.0f}" for name in TIMES]
        speed = f"{result.median('sequence') / result.median('overlap'):.2f}x"
        shares = [f"{value:.0%}" for value in (result.hidden, result.inner, result.covered)]
        grid.add_row(case.name, *times, speed, *shares)
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(1, 2, 2))
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--asleep", type=float, action="append", help="milliseconds a layer and micro-batch")
    parser.add_argument("--out", choices=["int8", "float32"], default="int8")
    parser.add_argument("--back", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--real", action=argparse.BooleanOptionalAction, default=True, help="also with real products")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=8, help="products that stand for attention when compute is real")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="write Chrome traces beside this path, one a case")
    args = parser.parse_args()
    cases = [Case(ms / 1e3, args.mbit) for ms in args.asleep or [40.0, 80.0, 120.0]]
    cases += [Case(None, args.mbit), Case(None, 0.0)] if args.real else []
    layer = {"hidden": args.hidden, "top_k": args.top_k, "experts": args.experts}
    try:
        with Network(Layout(args.shape.hosts, args.shape.racks)) as network:
            ranks = Ranks(network, args.shape, layer)
            try:
                results = {case: measure(ranks, case, args) for case in cases}
            finally:
                ranks.end()
    except NetError as error:
        sys.exit(f"ep_overlap.py cannot run here: {error}")
    Console(width=130).print(table(args.shape, results, args))


if __name__ == "__main__":
    main()
