"""The routed experts of one MoE layer alone, ours beside kt-kernel (or torch in bf16 where that is not installed).

    python benchmarks/moe_layer.py [--shape v2-lite] [--shape v3] [--rows 512] [--kt-python kt-env/bin/python]

V2-Lite and V3 shapes (V3 with 32 experts, so that it fits), 1, 8, 64 and 512 rows, int8 and int4, and the error of each
against float32 arithmetic. Interleaved like peers.py, in the same kind of processes; medians, ranges, ratios within
rounds. The layers of an engine are used in turn, so that weights come from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from peer_process import Fleet, Peer, PeerError
from peer_report import number_text, ratio_text, table
from rich.console import Console

from coterie.engine.limits import measure_limits
from coterie.kernels.machine import machine

SHAPES = {"v2-lite": (64, 6, 2048, 1408), "v3": (32, 8, 7168, 2048), "tiny": (8, 2, 256, 128)}
LAYERS = {"v2-lite": 3, "v3": 1, "tiny": 1}
TOKENS = (1, 8, 64, 512)
FORWARDS = 5


@dataclass(frozen=True, slots=True)
class Engine:
    """One column. `python`: of its environment."""

    name: str
    module: str
    config: dict[str, Any]
    python: str
    bits: int


def engines(threads: int, kt_python: str) -> list[Engine]:
    """Ours, and the peers that can be imported."""
    found = [
        Engine("coterie int8", "coterie", {"kind": "int8", "threads": threads}, sys.executable, 8),
        Engine("coterie int4", "coterie", {"kind": "int4", "threads": threads}, sys.executable, 4),
        Engine("kt AMXINT8", "kt", {"kind": "AMXINT8", "threads": threads}, kt_python, 8),
        Engine("kt AMXINT4", "kt", {"kind": "AMXINT4", "threads": threads}, kt_python, 4),
        Engine("torch bf16", "torch", {"threads": threads}, sys.executable, 16),
    ]
    module = {"kt": "kt_kernel"}
    missing = {}
    for engine in found:
        if engine.module not in missing:
            command = [engine.python, "-c", f"import {module.get(engine.module, engine.module)}"]
            missing[engine.module] = subprocess.run(command, capture_output=True, check=False).returncode != 0
    for name in [name for name, absent in missing.items() if absent]:
        print(f"{name} does not run: it cannot be imported", file=sys.stderr)
    return [engine for engine in found if not missing[engine.module]]


class Contest:
    """Rounds of one shape. `times`: seconds by (engine, tokens), one median a round."""

    def __init__(self, shape: str, engines: list[Engine], threads: int, rows: Sequence[int] = TOKENS) -> None:
        self.shape, self.engines, self.threads, self.rows = shape, engines, threads, rows
        self.fleet = Fleet(psutil.virtual_memory().available - 2_000_000_000)
        self.times: dict[tuple[str, int], list[float]] = {}
        self.reads: list[float] = []
        self.failures: dict[str, str] = {}
        experts, _, hidden, inner = SHAPES[shape]
        values = 3 * experts * hidden * inner * LAYERS[shape]
        for engine in engines:
            load = {"op": "load", "shape": SHAPES[shape], "layers": LAYERS[shape], "seed": 1, "config": engine.config}
            command = [engine.python, str(Path(__file__).with_name("moe_workers.py")), engine.module]
            self.fleet.add(Peer(engine.name, command, load, 4 * values + 500_000_000, Path("/dev/null")))

    def run(self, rounds: int, console: Console) -> None:
        try:
            for number in range(rounds + 1):  # the first warms up
                for tokens in self.rows:
                    for engine in self.engines:
                        self._shot(number, tokens, engine, console)
        finally:
            self.fleet.end()

    def _shot(self, number: int, tokens: int, engine: Engine, console: Console) -> None:
        if engine.name in self.failures:
            return
        self.fleet.rest()
        self.reads.append(measure_limits(self.threads, rounds=3, probes=("read",)).rates[0].median)
        request = {"op": "run", "tokens": tokens, "rounds": FORWARDS, "seed": number}
        try:
            seconds = statistics.median(self.fleet.ask(engine.name, request, 600)["seconds"])
        except PeerError as error:
            self.failures[engine.name] = str(error)
            console.print(f"{engine.name}: {error}", highlight=False, soft_wrap=True)
            return
        if number:
            self.times.setdefault((engine.name, tokens), []).append(seconds)
        console.print(f"{self.shape}, round {number}, {tokens} rows, {engine.name}: {1e3 * seconds:.2f} ms")

    def markdown(self) -> str:
        experts, top_k, hidden, inner = SHAPES[self.shape]
        title = f"### {self.shape}: {experts} experts, top {top_k}, {hidden} x {inner}, {self.threads} threads"
        read = statistics.median(self.reads) / 1e9
        names = [engine.name for engine in self.engines]
        lines = [title, "", f"Reading memory: {read:.1f} GB/s. A cell: ms (range), rows a second.", ""]
        rows = [[f"{tokens} rows", *(self._cell(name, tokens) for name in names)] for tokens in self.rows]
        loads = {name: self.fleet.loaded(name) for name in names}
        for title, key, scale, unit in (("error to float32", "error_to_f32", 1.0, ""),
                                        ("weights of a layer", "nbytes", 1e9, " GB")):  # fmt: skip
            cells = ["-" if load is None else f"{load[key] / scale:.3g}{unit}" for load in loads.values()]
            rows.append([title, *cells])
        lines += table(["routed experts", *names], rows)
        ours = [engine for engine in self.engines if engine.module == "coterie"]
        pairs = [(a.name, b.name) for a in ours for b in self.engines
                 if b.module != "coterie" and b.bits in (a.bits, 16)]  # fmt: skip
        if pairs:
            rows = [[f"{n} rows", *(ratio_text(self._ratio(n, *pair)) for pair in pairs)] for n in self.rows]
            lines += ["", *table(["times as fast", *(f"{a} : {b}" for a, b in pairs)], rows)]
        return "\n".join([*lines, "", *(f"- {name}: {reason}" for name, reason in self.failures.items())])

    def _cell(self, name: str, tokens: int) -> str:
        times = self.times.get((name, tokens))
        if not times:
            return "failed" if name in self.failures else "-"
        middle, low, high = (1e3 * value for value in (statistics.median(times), min(times), max(times)))
        rate = 1e3 * tokens / middle
        return f"{number_text(middle)} ({number_text(low)}..{number_text(high)}), {number_text(rate)}"

    def _ratio(self, tokens: int, ours: str, peer: str) -> float | None:
        a, b = self.times.get((ours, tokens), []), self.times.get((peer, tokens), [])
        return statistics.median(y / x for x, y in zip(a, b, strict=False)) if a and b else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, action="append", choices=TOKENS, help="only these (default: all)")
    parser.add_argument("--entrants", help="only these engines, with commas: 'coterie int8,kt AMXINT8'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=machine().threads)
    parser.add_argument("--kt-python", default=sys.executable, help="python of an environment with kt-kernel")
    arguments = parser.parse_args()
    available = engines(arguments.threads, arguments.kt_python)
    if arguments.entrants:
        wanted = [name.strip() for name in arguments.entrants.split(",")]
        if unknown := set(wanted) - {engine.name for engine in available}:
            parser.error(f"{', '.join(sorted(unknown))}: there is {', '.join(engine.name for engine in available)}")
        available = [engine for engine in available if engine.name in wanted]
    for shape in arguments.shape or ["v2-lite", "v3"]:
        contest = Contest(shape, available, arguments.threads, arguments.rows or TOKENS)
        contest.run(arguments.rounds, Console(stderr=True))
        print(contest.markdown())


if __name__ == "__main__":
    main()
