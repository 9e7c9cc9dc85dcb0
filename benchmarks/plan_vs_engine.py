"""`plan step` against the engine: decode and prefill of models that the calibration never ran, on this machine.

    python benchmarks/plan_vs_engine.py [--hardware machine.yaml] [--cases demo,v2-lite-bf16,v2-lite-int8,v2-lite-int4]
        [--layers 3] [--json OUT]

Without --hardware the machine is calibrated first (`coterie plan calibrate`). Then each case runs in the engine: the
shipped model, and DeepSeek-V2-Lite's shape cut to a few layers with random weights, in bf16, int8 and int4 (the head
bf16). The table has the time measured (lowest tenth of decode steps, fastest of a few prompts) and two predictions:
with the file as it is, and with the file's rates scaled by what memory and multipliers give in the same moment, which
is the error of the model alone on a host whose speed changes. Nothing is fitted here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
from make_checkpoint import Cut, make_config
from peer_report import table

from coterie.cli.plan_calibrate import ALONE, measure
from coterie.engine.build import ModelFiles, build_engine, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.readings import SETS, Reader
from coterie.engine.small_steps import StepTimer
from coterie.model.shipped import shipped_model_path
from coterie.planner.cost import Efficiency, decode_step, prefill_step
from coterie.planner.devices import device
from coterie.planner.layout import WeightName
from coterie.planner.measured import Constants, Measured
from coterie.planner.measured_file import read_engine
from coterie.planner.ops import Point
from coterie.spec.hardware import HardwareSpec
from coterie.spec.weights import QuantPlan

DECODE = ((1, 128), (1, 1024), (2, 128), (4, 128), (16, 128))
PREFILL = (64, 256, 512)
STEPS, ROUNDS = 16, 2
QUANTISED: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
CASES = ("demo", "v2-lite-bf16", *(f"v2-lite-{form}" for form in QUANTISED))
Rates = tuple[float, float, float]
"""Bytes a second read, operations a second of the wide and of the integer unit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates and kernels as calibrated, and what was read beside them: (read, wide peak, integer peak)."""

    hardware: HardwareSpec
    measured: Measured

    def now(self, rates: Rates) -> Machine:
        """The same at the rates of a moment; constants go with the multipliers."""
        hw = self.hardware
        read, wide, integer = rates
        bytes_factor = read / self.measured.read_rate(SETS[1])
        speed = wide / (hw.bf16_tops * 1e12)
        constants = {each.name: getattr(self.measured.constants, each.name) / speed for each in fields(Constants)}
        measured = replace(
            self.measured,
            reads=tuple((size, rate * bytes_factor) for size, rate in self.measured.reads),
            constants=Constants(**constants),
        )
        return Machine(replace(hw, bf16_tops=wide / 1e12, int8_tops=integer / 1e12), measured)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how the engine holds it, and what planning calls that format."""

    name: str
    files: ModelFiles
    config: EngineConfig
    form: WeightName


@dataclass(frozen=True, slots=True)
class Result:
    """One point: seconds in the engine, as the file says, and as the file says at the moment's rates. read: GB/s of
    that moment."""

    case: str
    phase: str
    batch: int
    context: int
    engine: float
    planned: float
    now: float
    read: float

    def error(self, *, now: bool) -> float:
        return (self.now if now else self.planned) / self.engine - 1


def cases(layers: int) -> list[Case]:
    """All that can be run."""
    cut = make_config("v2-lite", Cut(layers=layers))
    common = EngineConfig(enable_prefix_caching=False, kv_cache_tokens=1024 * max(batch for batch, _ in DECODE))
    dummy = replace(common, load_format="dummy", max_model_len=2048)
    return [
        Case("demo", open_model(shipped_model_path()), common, "bf16"),
        Case("v2-lite-bf16", open_model(cut), dummy, "bf16"),
        *(
            Case(f"v2-lite-{form}", open_model(cut), replace(dummy, quant=QuantPlan(form, form, "bf16")), form)
            for form in QUANTISED
        ),
    ]


class Comparison:
    """Runs points in the engine and in the planner."""

    def __init__(self, case: Case, machine: Machine) -> None:
        self.case, self.machine = case, machine
        self.reader = Reader(machine.measured.threads)
        config = replace(case.config, threads=machine.measured.threads)
        self.timer = StepTimer(build_engine(case.files, config)[0])
        self.timer.prompt(16)

    def points(self) -> list[Result]:
        """Every point, the fastest of some rounds over all."""
        wanted = [(False, 1, length) for length in PREFILL] + [(True, *point) for point in DECODE]
        rounds = [[self.point(*each) for each in wanted] for _ in range(ROUNDS)]
        return [min(same, key=lambda result: result.engine) for same in zip(*rounds, strict=True)]

    def point(self, decode: bool, batch: int, context: int) -> Result:
        """One point, with rates read before and after."""
        before = self.rates()
        if decode:
            seconds = float(np.quantile(self.timer.streams(batch, context, STEPS), 0.1))
            before = self.rates()  # filling the context has taken its time
            point = Point(batch=batch, context=context + STEPS / 2)
        else:
            seconds = min(self.timer.prompt(context) for _ in range(2))
            point = Point(batch=1, context=context)
        return self.result(point, seconds, mean(before, self.rates()), decode=decode)

    def rates(self) -> Rates:
        """What memory and the multipliers give now."""
        return self.reader.read_rate(SETS[1]), self.reader.peak("bf16"), self.reader.peak("int8")

    def result(self, point: Point, seconds: float, rates: Rates, *, decode: bool) -> Result:
        """A point beside its predictions."""
        step, layout = decode_step if decode else prefill_step, replace(ALONE, weights=self.case.form)
        planned, now = (
            step(self.case.files.spec, each.hardware, layout, point, Efficiency(measured=each.measured, absorbed=True))
            for each in (self.machine, self.machine.now(rates))
        )
        return Result(
            self.case.name, "decode" if decode else "prefill", int(point.batch), int(point.context), seconds,
            planned.seconds, now.seconds, rates[0] / 1e9,
        )  # fmt: skip


def mean(one: Rates, two: Rates) -> Rates:
    return (one[0] + two[0]) / 2, (one[1] + two[1]) / 2, (one[2] + two[2]) / 2


def summary(results: list[Result]) -> list[list[str]]:
    """Median and largest error by phase and case, for both predictions."""
    lines = []
    for phase in ("decode", "prefill"):
        for case in (*dict.fromkeys(result.case for result in results), "all"):
            group = [each for each in results if each.phase == phase and case in (each.case, "all")]
            cells = []
            for now in (False, True):
                errors = [abs(each.error(now=now)) for each in group]
                cells += [f"{100 * statistics.median(errors):.0f} %", f"{100 * max(errors):.0f} %"]
            lines.append([phase, case, str(len(group)), *cells])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", help="a file of `plan calibrate` (default: calibrate first)")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of the calibration")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.hardware is None:
        machine = Machine(*measure(None, Path(), args.rounds, lambda line: print(line, flush=True)))
    else:
        engine = read_engine(args.hardware)
        assert engine is not None, "not a file of plan calibrate"
        machine = Machine(device(args.hardware), engine)
    hw = machine.hardware
    print(f"{hw.name}, {machine.measured.isa}: {hw.memory_gbps:.1f} GB/s, {hw.bf16_tops:.3f} T/s, {hw.int8_tops:.3f}")
    results: list[Result] = []
    for case in cases(args.layers):
        if case.name in args.cases.split(","):
            results += Comparison(case, machine).points()
    lines = [
        [each.case, each.phase, str(each.batch), str(each.context), f"{1e3 * each.engine:.2f}",
         f"{1e3 * each.planned:.2f}", f"{100 * each.error(now=False):+.0f} %", f"{1e3 * each.now:.2f}",
         f"{100 * each.error(now=True):+.0f} %", f"{each.read:.1f}"]
        for each in results
    ]  # fmt: skip
    heads = ["case", "phase", "batch", "context", "engine ms", "file ms", "error", "now ms", "error", "read GB/s"]
    print("\n".join(table(heads, lines)) + "\n")
    heads = ["phase", "case", "n", "file: median", "largest", "at the moment's rates: median", "largest"]
    print("\n".join(table(heads, summary(results))))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
