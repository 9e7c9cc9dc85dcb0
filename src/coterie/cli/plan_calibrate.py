"""`coterie plan calibrate`: read this machine's rates, our kernels and our engine's constants; write a hardware file.

Three rounds over everything. Rates and steps are the fastest of them, shares of rates the median: the file says what
the machine gives when nothing else runs on it, and a slow moment of the host spoils one reading of three. The models
that give the constants are made up and tiny; none that predictions are made for is run. Under a minute on two cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from coterie.cli.common import AT_LEAST_ONE, THREADS, error_console
from coterie.cli.main import check_folder, debug_option
from coterie.engine.readings import (
    FORMS,
    READ_SETS,
    Reader,
    Reading,
    check_room,
    disk_rate,
    memory_limit,
    processor_name,
)
from coterie.engine.small_steps import SmallStep, small_steps
from coterie.planner.layout import Layout
from coterie.planner.measured import NOTHING, Measured, Share, fit_constants, share_of
from coterie.planner.measured_file import file_text
from coterie.planner.ops import Op, Point, step_ops
from coterie.spec.errors import CoterieError
from coterie.spec.hardware import HardwareSpec

ROUNDS = 3
LAST_START = 35.0
"""Seconds after which no further round begins, so that a slow machine is done in a minute too."""
ALONE = Layout(devices=1, tp=1, dp=1, ep=1, weights="bf16")


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("machine.yaml"), show_default=True,
              help="The hardware file to write.")  # fmt: skip
@click.option("--threads", "-t", type=THREADS, help="Threads. [default: the cores we may use]")
@click.option("--disk", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("."),
              show_default=True, help="A folder on the disk that weights would be read from.")  # fmt: skip
@click.option("--rounds", type=AT_LEAST_ONE, default=ROUNDS, show_default=True, help="Rounds over everything, at most.")
@debug_option
def calibrate(out: Path, threads: int | None, disk: Path, rounds: int) -> None:
    """Measure this machine and write a hardware file that `--hardware` takes.

    Memory's read rate by size, matrix rates, our kernels on a grid of shapes, attention, the engine's constants, the
    disk, and the memory this process may have.
    """
    check_folder(out)
    console, begin = error_console(), time.perf_counter()
    hardware, measured = measure(threads, disk, rounds, lambda line: console.print(line, soft_wrap=True))
    try:
        out.write_text(file_text(hardware, measured), encoding="utf-8")
    except OSError as error:
        raise CoterieError(f"cannot write {out}: {error.strerror}") from error
    constants = measured.constants
    click.echo(f"{hardware.name}: {measured.threads} threads, {measured.isa}, {hardware.memory_gb:.1f} GB of memory")
    rates = ", ".join(f"{rate:.1f} GB/s around {size / 2**20:.0f} MiB" for size, rate in measured.reads)
    click.echo(f"reading: {rates}")
    click.echo(f"matrices: bf16 {hardware.bf16_tops:.3f} T/s, int8 {hardware.int8_tops:.3f} T/s; disk "
               f"{hardware.disk_gbps:.2f} GB/s")  # fmt: skip
    click.echo(f"constants: step {1e6 * constants.step:.0f} us, layer {1e6 * constants.dense_layer:.0f} us dense and "
               f"{1e6 * constants.moe_layer:.0f} us with experts, stream {1e6 * constants.stream:.1f} us")  # fmt: skip
    click.echo(f"wrote {out} after {time.perf_counter() - begin:.0f} s; use it as --hardware {out}")


def measure(threads: int | None, disk: Path, rounds: int, tell: Callable[[str], None]) -> tuple[HardwareSpec, Measured]:
    """Everything that a hardware file holds."""
    check_room()
    reader = Reader(threads)
    reads: dict[float, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    kernels: list[Reading] = []
    steps: list[list[SmallStep]] = []
    begin = time.perf_counter()
    for number in range(rounds):
        if time.perf_counter() - begin > LAST_START:
            break
        tell(f"round {number + 1} of {rounds}: rates, products, attention, small steps")
        for size in (*READ_SETS, None):
            reads.setdefault(reader.set_bytes(size), []).append(reader.read_rate(size))
        for form in ("bf16", "int8"):
            peaks.setdefault(form, []).append(reader.peak(form))
        for form in FORMS:
            kernels += reader.products(form)
        kernels += reader.attention()
        steps.append(list(small_steps(threads)))
    tell("disk")
    rates = {size: max(found) for size, found in reads.items()}
    hardware = HardwareSpec(
        name=processor_name(), kind="cpu", bf16_tops=max(peaks["bf16"]) / 1e12,
        int8_tops=max(peaks["int8"]) / 1e12, memory_gb=memory_limit() / 1e9,
        memory_gbps=rates[max(rates)] / 1e9, disk_gbps=disk_rate(disk) / 1e9, measured=True,
        source=f"coterie plan calibrate, {time.strftime('%Y-%m-%d')}",
    )  # fmt: skip
    measured = Measured(
        threads=reader.threads, isa=reader.kernels.isa,
        reads=tuple((size, rate / 1e9) for size, rate in sorted(rates.items())),
        shares=shares_of(kernels), constants=NOTHING,
    )  # fmt: skip
    return hardware, replace(measured, constants=fit_constants(fastest_steps(steps), hardware, measured))


def shares_of(readings: list[Reading]) -> tuple[Share, ...]:
    """Median share of each point of the grid; attention's is one for all sizes of cache."""
    found: dict[tuple[str, float, float, float], list[float]] = {}
    for each in readings:
        around = 1.0 if each.form in ("mla", "gqa") else each.set_bytes
        share = share_of((each.seconds, each.nbytes, each.operations), each.read, each.peak)
        found.setdefault((each.form, each.unit, around, each.rows), []).append(share)
    return tuple(Share(*key, statistics.median(values)) for key, values in sorted(found.items()))


def fastest_steps(rounds: list[list[SmallStep]]) -> list[tuple[tuple[Op, ...], float]]:
    """(operations, least seconds) of every small step."""
    found = []
    for same in zip(*rounds, strict=True):
        point = Point(batch=same[0].batch, context=same[0].context)
        points = (point, None) if same[0].decode else (None, point)
        ops = step_ops(same[0].spec, ALONE, *points, absorbed=True)
        found.append((ops, min(step.seconds for step in same)))
    return found
