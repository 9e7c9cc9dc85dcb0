"""Two-batch overlap between "hosts" on a slow link: how much of the smaller of compute and communication is hidden.

    python benchmarks/ep_overlap.py [--shape 2x2] [--mbit 200] [--trace FILE]

Ranks run a stack of MoE layers (ep_stack.py) over the exchange, in hosts that are network namespaces (ep_net.py; root).
Measured in turns within one process: communication alone, compute alone, two micro-batches one after the other, and in
turns. `hidden` is (sequence - overlap) / min(comm, compute); `under compute` is taken from the trace of one overlapped
step. Sleeping compute stands for a device that leaves the host idle; real compute shares the host's cores with the
exchange and with all other ranks of this machine.
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


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over rounds of the slowest rank, in seconds; the share of ratios is the median of the rounds' own."""

    comm: float
    compute: float
    sequence: float
    overlap: float
    hidden: float
    covered: float

    @classmethod
    def of(cls, answers: list[dict[str, Any]]) -> Result:
        """From the ranks' answers: a round is as slow as its slowest rank."""
        rounds = [
            {
                name: max(answer[name][index] for answer in answers)
                for name in ("comm", "compute", "sequence", "overlap")
            }
            for index in range(len(answers[0]["comm"]))
        ]
        hidden = [(r["sequence"] - r["overlap"]) / min(r["comm"], r["compute"]) for r in rounds]
        medians = [statistics.median(r[name] for r in rounds) for name in TIMES]
        covered = statistics.mean(answer["hidden"] for answer in answers)
        return cls(*medians, statistics.median(hidden), covered)


def measure(ranks: Ranks, case: Case, args: argparse.Namespace) -> Result:
    """All rounds of one case; writes its trace if one is asked for."""
    ranks.network.limit(case.mbit or None)
    request = {"op": "overlap", "form": "flat", "compute": "real" if case.seconds is None else "sleep",
               "seconds": case.seconds or 0.0, "tokens": args.tokens, "layers": args.layers, "inner": args.inner,
               "repeats": args.repeats, "rounds": args.rounds, "hidden": args.hidden, "top_k": args.top_k,
               "trace": args.trace is not None}  # fmt: skip
    answers = ranks.all(request)
    if args.trace is not None:
        events = [event for answer in answers for event in answer["trace"]]
        path = args.trace.with_stem(
            f"{args.trace.stem}-{case.name.replace(' ', '-').replace('/', '').replace(',', '')}"
        )
        write_chrome(path, events)
    return Result.of(answers)


def table(shape: Shape, results: dict[Case, Result], args: argparse.Namespace) -> Table:
    """Milliseconds of a step and the shares."""
    title = f"{shape}, {args.layers} layers, 2 x {args.tokens // 2} tokens a rank, {args.rounds} rounds"
    grid = Table(title=title, title_justify="left")
    for head in ("compute, link", "comm", "compute", "sequence", "overlap", "speed-up", "hidden", "under compute"):
        grid.add_column(head, justify="left" if head == "compute, link" else "right")
    for case, result in results.items():
        times = [f"{value * 1e3:.0f}" for value in (result.comm, result.compute, result.sequence, result.overlap)]
        speed = f"{result.sequence / result.overlap:.2f}x"
        grid.add_row(case.name, *times, speed, f"{result.hidden:.0%}", f"{result.covered:.0%}")
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(1, 2, 2))
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--asleep", type=float, action="append", help="milliseconds a layer and micro-batch")
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
    cases += [Case(None, args.mbit), Case(None, 0.0)]
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
