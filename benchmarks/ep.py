"""Expert parallelism between "hosts" on slow links: dispatch and combine in every form, bytes over the network.

    python benchmarks/ep.py [--shape 2x2] [--shape 2x4] [--mbit 0] [--mbit 1000] [--mbit 200] [--tokens 512]
                            [--rows float32] [--rows narrow] [--piece-kib 256] [--piece-kib 0] [--follow] [--choices 3]

Hosts are network namespaces of this machine (ep_net.py; root, or `unshare -Urnm`), ranks are processes in them. A shape
is hosts x ranks a host; 2x2x2 is racks x hosts x ranks. `--mbit 0` is an unlimited link. Rows are float32 both ways, or
narrow: int8 with a factor per 32 values out, bf16 back. The exact forms are measured with what goes to other hosts
first and in pieces of at least so many KiB, and whole (0). Forms take turns in every round; times are medians over
rounds of the slowest rank: compare them within one run only, as all ranks share this machine's cores. `link use` is a
class of hops' bytes over the time of the whole exchange, over what its link carries: that of a rank inside a host as
probed, of the busiest host and rack as shaped (as probed where unlimited); a shaper lets its burst (128 KB) pass at
once, so small steps may show more than all. `--choices N` chooses the form N times at each speed, by expectation and by
trials, and says by how much each choice is slower than the fastest exact form of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ep_net import Layout, NetError, Network
from rich.console import Console
from rich.table import Table

from coterie.comm.exchange import PIECE_BYTES

WORKER = Path(__file__).with_name("ep_worker.py")
FORMS = ("flat", "hierarchical", "flat-reduced", "hierarchical-reduced")
EXACT = ("flat", "hierarchical")
SMALL_TOKENS = 8
FOLLOW_ROUNDS = 220
"""Three windows of the measured speeds and a little: one to see a change, one to try the other form, one to stay."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Racks, hosts in all, ranks in each."""

    racks: int
    hosts: int
    local: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """2x4: two hosts of four ranks; 2x2x2: two racks of two hosts of two ranks."""
        numbers = [int(part) for part in text.split("x")]
        if len(numbers) == 2:
            return cls(1, *numbers)
        racks, hosts, local = numbers
        return cls(racks, racks * hosts, local)

    @property
    def size(self) -> int:
        return self.hosts * self.local

    def __str__(self) -> str:
        racks = f"{self.racks} racks x " if self.racks > 1 else ""
        return f"{racks}{self.hosts // self.racks} hosts x {self.local} ranks"


class Ranks:
    """The processes of one shape. Always ended."""

    def __init__(self, network: Network, shape: Shape, layer: dict[str, int]) -> None:
        self.network, self.shape = network, shape
        self._started: list[subprocess.Popen[str]] = []
        try:
            store = self._start(network.switch(0), ["store", network.store_host])
            port = self._ask(store, {"op": "port"})["port"]
            self.ranks = [self._start(network.host(rank // shape.local), ["rank"]) for rank in range(shape.size)]
            racks = [network.rack_of(host) for host in range(shape.hosts)]
            common = {"op": "join", "host": network.store_host, "port": port, "size": shape.size, **layer}
            self.all({**common, "nodes": shape.hosts, "racks": racks}, numbered=True)
        except BaseException:
            self.end()
            raise

    def _start(self, namespace: str, arguments: list[str]) -> subprocess.Popen[str]:
        command = [*self.network.inside(namespace), sys.executable, str(WORKER), *arguments]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        self._started.append(process)
        return process

    def _ask(self, process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
        self._tell(process, request)
        answer = self._hear(process)
        if "error" in answer:
            raise NetError(answer["error"])
        return answer

    def _tell(self, process: subprocess.Popen[str], request: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()

    def _hear(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended with {process.wait()}"}
        return answer

    def all(self, request: dict[str, Any], *, numbered: bool = False) -> list[dict[str, Any]]:
        """Ask all ranks at once; answers by rank."""
        for rank, process in enumerate(self.ranks):
            self._tell(process, {**request, "rank": rank} if numbered else request)
        answers = [self._hear(process) for process in self.ranks]
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if errors:
            raise NetError("\n  ".join(["ranks failed:", *errors]))
        return answers

    def end(self) -> None:
        """Kill every process."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()


@dataclass(frozen=True, slots=True)
class Way:
    """A form and how it sends: rows of the fixed capacity, bytes of a piece (0: whole)."""

    form: str
    capacity: int = 0
    piece_bytes: int = 0

    @property
    def name(self) -> str:
        if self.capacity:
            return f"fixed capacity {self.capacity}"
        return f"{self.form}, pieces of {self.piece_bytes >> 10} KiB" if self.piece_bytes else self.form


@dataclass(slots=True)
class Row:
    """One way at one speed: (dispatch, combine) of the slowest rank by round; bytes of all rounds: of each host's
    interface, of each further rack's, of a rank over each class of hop."""

    way: Way
    times: list[tuple[float, float]]
    hosts: list[float]
    racks: list[float]
    hops: list[float]

    @property
    def median(self) -> tuple[float, float]:
        """(dispatch, combine) of the round of median length."""
        return sorted(self.times, key=sum)[(len(self.times) - 1) // 2]

    @property
    def seconds(self) -> float:
        return sum(self.median)

    @property
    def mean_seconds(self) -> float:
        """What bytes of all rounds are to be divided by."""
        return sum(map(sum, self.times)) / len(self.times)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second of a rank's link inside a host, of a host's, and of a rack's."""

    rank: float
    host: float
    rack: float

    @classmethod
    def of(cls, shape: Shape, mbit: float, probed: dict[str, Any]) -> LinkRates:
        """As shaped, or as probed: there a rank's share of its host's link is measured while all send."""
        host = mbit * 1e6 / 8 if mbit else probed["between"] * shape.local
        rack = mbit * 1e6 / 8 if mbit else probed["between"] * shape.size / shape.racks
        return cls(probed["inside"], host, rack)

    def use(self, row: Row) -> list[float]:
        """Share of each class of link's rate that a row's bytes took, over whole exchanges."""
        rounds = len(row.times)
        parts = [(row.hops[0] / rounds, self.rank), (max(row.hosts) / rounds, self.host)]
        if row.racks:
            parts.append((max(row.racks) / rounds, self.rack))
        return [nbytes / row.mean_seconds / rate for nbytes, rate in parts]


def measure(ranks: Ranks, rows: str, ways: list[Way], tokens: int, rounds: int) -> list[Row]:
    """All ways in turn, round by round, after one that is not counted."""
    network, hosts, racks = ranks.network, ranks.shape.hosts, ranks.shape.racks
    found = [Row(way, [], [0.0] * hosts, [0.0] * (racks - 1), [0.0] * 3) for way in ways]

    def sent() -> list[int]:
        return [network.sent_bytes(host) for host in range(hosts)] + [network.rack_bytes(n) for n in range(1, racks)]

    for number in range(rounds + 1):
        for row in found:
            way, before = row.way, sent()
            request = {"op": "measure", "rows": rows, "form": way.form, "capacity": way.capacity, "tokens": tokens}
            answers = ranks.all({**request, "piece_bytes": way.piece_bytes, "rounds": 1, "seed": 1})
            if not number:
                continue
            more = [new - old for new, old in zip(sent(), before, strict=True)]
            row.hosts = [have + nbytes for have, nbytes in zip(row.hosts, more[:hosts], strict=True)]
            row.racks = [have + nbytes for have, nbytes in zip(row.racks, more[hosts:], strict=True)]
            row.hops = [have + max(a["hops"][hop] for a in answers) for hop, have in enumerate(row.hops)]
            slowest = max((answer["seconds"][0] for answer in answers), key=sum)
            row.times.append((slowest[0], slowest[1]))
    return found


def report(console: Console, title: str, rows: list[Row], rates: LinkRates, chosen: str) -> None:
    """One table, with ratios to the flat form of the same run."""
    flat, lines = rows[0].seconds, []
    for row in rows:
        dispatch, combine = row.median
        rounds = len(row.times)
        lines.append(
            [row.way.name, f"{row.seconds * 1e3:.1f}", f"{dispatch * 1e3:.1f}", f"{combine * 1e3:.1f}",
             f"{flat / row.seconds:.2f}x", f"{max(row.hosts) / rounds / 1e6:.2f}",
             " / ".join(f"{hop / rounds / 1e6:.2f}" for hop in row.hops),
             " / ".join(f"{share:.0%}" for share in rates.use(row))]
        )  # fmt: skip
    heads = ["form", "ms", "dispatch", "combine", "to flat", "NIC MB", "MB a rank: in host / hosts / racks", "link use"]
    grid = Table(title=title, title_justify="left")
    for head in heads:
        grid.add_column(head, justify="left" if head == "form" else "right")
    for line in lines:
        grid.add_row(*line)
    console.print(grid)
    console.print(chosen)


def follow_a_link(console: Console, network: Network, ranks: Ranks) -> None:
    """Serve while the links become slow and fast again: when the form follows, in rounds of one layer."""
    request = {"op": "serve", "rows": "float32", "traffic": 512, "tokens": 32, "rounds": FOLLOW_ROUNDS, "seed": 2}
    network.limit(None)
    network.limit_racks(None)
    said = []
    for mbit in (None, 100, None):
        network.limit(mbit)
        answers = ranks.all(request)
        if any(answer != answers[0] for answer in answers):
            raise NetError("ranks did not change their form in the same round")
        forms = answers[0]["forms"]
        changes = [number for number in range(1, len(forms)) if forms[number] != forms[number - 1]]
        speed = "unlimited" if mbit is None else f"{mbit} Mbit/s"
        said.append(f"{speed}: {forms[0]}" + "".join(f", {forms[number]} from round {number} on" for number in changes))
    console.print(
        f"{FOLLOW_ROUNDS} rounds each, the result of every round equal to one rank's. " + "; ".join(said) + "\n"
    )


def bench_rows(console: Console, ranks: Ranks, rows: str, mbit: float, args: argparse.Namespace) -> None:
    """All forms of one kind of rows at one speed, in long and in short steps."""
    found = ranks.all({"op": "probe", "rows": rows, "tokens": args.tokens, "small": SMALL_TOKENS})[0]
    rates = LinkRates.of(ranks.shape, mbit, found)
    pieces = [kib << 10 for kib in args.piece_kib]
    ways = [Way(form, 0, size) for form in FORMS for size in pieces if form in EXACT or size == pieces[0]]
    long = measure(ranks, rows, [way if way.form in EXACT else Way(way.form) for way in ways], args.tokens, args.rounds)
    by_form = {row.way.form: row.seconds for row in reversed(long)}
    ratio = by_form["flat-reduced"] / by_form["hierarchical-reduced"]
    chosen = (
        f"probe: {found['links']}; expected {found['expected'][0]} (exact), {found['any']} (any); "
        f"chosen after trials of {found['seconds']:.1f} s: {found['tried'][0]}. "
        f"hierarchical-reduced is {ratio:.2f}x as fast as flat-reduced and "
        f"{by_form['flat'] / by_form['hierarchical-reduced']:.2f}x as flat\n"
        f"{found['reasons'][0].partition('; ')[2]}\n"
    )
    title = f"{ranks.shape}, {f'{mbit:g} Mbit/s' if mbit else 'unlimited'}, {rows} rows"
    report(console, f"{title}, {args.tokens} tokens a rank", long, rates, chosen)
    ways = [Way("flat"), Way("flat", SMALL_TOKENS), Way("hierarchical")]
    small = measure(ranks, rows, ways, SMALL_TOKENS, 5)
    short = f"short steps: {found['reasons'][1]}; capacity {found['tried'][1] or 'none'}\n"
    report(console, f"{title}, {SMALL_TOKENS} tokens a rank", small, rates, short)


def judge(ranks: Ranks, rows: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """By how much the forms that are chosen, by expectation and by trials, are slower than the fastest exact one."""
    ask = {"op": "probe", "rows": rows, "tokens": args.tokens, "small": SMALL_TOKENS}
    found = [ranks.all(ask)[0] for _ in range(args.choices)]
    reasons = ["; ".join(part.partition("; ")[2] for part in one["reasons"]) for one in found]
    sized = [(form, 0) for form in FORMS[:2]]
    for tokens, forms in ((args.tokens, sized), (SMALL_TOKENS, [*sized, ("flat", SMALL_TOKENS)])):
        ask = {"op": "compare", "rows": rows, "forms": forms, "tokens": tokens, "rounds": args.rounds, "seed": 1}
        seconds = np.array([answer["seconds"] for answer in ranks.all(ask)]).max(0)
        took = dict(zip(forms, np.median(seconds, axis=0).tolist(), strict=True))
        cells = [str(tokens), *(f"{1e3 * took[form]:.1f}" for form in forms)] + [""] * (3 - len(forms))
        for way in ("expected", "tried"):
            chosen = [("flat", one[way][1]) if one[way][1] and tokens == SMALL_TOKENS else (one[way][0], 0)
                      for one in found]  # fmt: skip
            loss = [took[form] / min(took.values()) - 1 for form in chosen]
            names = Counter("fixed" if capacity else form for form, capacity in chosen)
            cells += [", ".join(f"{count} x {name}" for name, count in names.items()), f"{np.mean(loss):.1%}"]
        yield [*cells, f"{max(one['seconds'] for one in found):.1f}"]
    print(*reasons, sep="\n", file=sys.stderr)


def bench(console: Console, shape: Shape, args: argparse.Namespace) -> None:
    """All speeds of one shape."""
    layer = {"hidden": args.hidden, "top_k": args.top_k, "experts": args.experts}
    choices = Table("link, rows", "tokens a rank", "flat ms", "hierarchical ms", "fixed ms", "by expectation",
                    "slower by", "by trials", "slower by", "trials s", title=f"{shape}, choices")  # fmt: skip
    with Network(Layout(shape.hosts, shape.racks)) as network:
        ranks = Ranks(network, shape, layer)
        try:
            for mbit in args.mbit:
                network.limit(mbit or None)
                network.limit_racks(mbit or None)
                for rows in args.rows:
                    if args.choices:
                        speed = f"{mbit:g} Mbit/s" if mbit else "unlimited"
                        for line in judge(ranks, rows, args):
                            choices.add_row(f"{speed}, {rows}", *line)
                    else:
                        bench_rows(console, ranks, rows, mbit, args)
            if args.choices:
                console.print(choices)
            if args.follow:
                follow_a_link(console, network, ranks)
        finally:
            ranks.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", type=Shape.parse)
    parser.add_argument("--mbit", action="append", type=float)
    parser.add_argument("--rows", action="append", choices=["float32", "narrow"])
    parser.add_argument("--piece-kib", action="append", type=int, help="of a piece; 0: whole; both by default")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--choices", type=int, default=0, help="only choose, so often; say by how much it was wrong")
    parser.add_argument(
        "--follow", action="store_true", help="also serve while links change, and say when the form does"
    )
    args = parser.parse_args()
    args.mbit = ([] if args.follow else [0, 1000, 200]) if args.mbit is None else args.mbit
    args.rows = args.rows or ["float32", "narrow"]
    args.piece_kib = args.piece_kib or [PIECE_BYTES >> 10, 0]
    console = Console(width=160 if args.choices else 150)
    for shape in args.shape or [Shape(1, 2, 2), Shape(1, 2, 4)]:
        try:
            bench(console, shape, args)
        except NetError as error:
            sys.exit(f"ep.py cannot run here: {error}")


if __name__ == "__main__":
    main()
