"""Products of the native kernels alone, by weight kind and ISA level, beside the limits of the machine.

    python benchmarks/kernels.py [--isa avx512 --isa avx2] [--rows 1 --rows 48] [--rounds 5] [--threads N] [--tiny]

The experts of one V2-Lite layer: every expert gets so many rows. One row is a matter of memory (GB/s of weights), many
are one of multipliers (GOP/s). Every round measures the limits and then each level, one after the other; figures are
medians of rounds, shares are medians of the shares within a round. Not a measurement of models (`coterie bench`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
from peer_report import table

from coterie.engine.limits import measure_limits
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.spec.weights import BF16, F32, INT4_TABLE, MXFP4_TABLE, MatrixSpec, WeightFormat

FORMATS = {
    "f32": F32,
    "bf16": BF16,
    "int8 g128": WeightFormat("int8", 128, "f16"),
    "int8 g32": WeightFormat("int8", 32, "f16"),
    "int4 g128": WeightFormat("code4", 128, "f16", INT4_TABLE),
    "int4 g32": WeightFormat("code4", 32, "f16", INT4_TABLE),
    "mxfp4": WeightFormat("code4", 32, "e8m0", MXFP4_TABLE),
    "affine4 g32": WeightFormat("affine4", 32, "f16"),
}
HIDDEN, INNER, EXPERTS = 2048, 1408, 24
TINY = (128, 64, 2)
PROBES = ("read", "f32", "int8", "amx_int8", "amx_bf16")


@dataclass(slots=True)
class Cell:
    """Rounds of one level with one number of rows: rate, and its share of the limit measured beside it."""

    rates: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def text(self) -> str:
        return f"{statistics.median(self.rates):.0f} ({100 * statistics.median(self.shares):.0f} %)"


class Layer:
    """The experts of one layer on one level."""

    def __init__(self, isa: str, threads: int, format: WeightFormat, shape: tuple[int, int, int]) -> None:
        hidden, inner, self.experts = shape
        self.kernels = NativeKernels(threads, isa)
        up, down = MatrixSpec(2 * inner, hidden, format, 2), MatrixSpec(hidden, inner, format)
        self.banks = self.kernels.allocate(self.experts, up, down)
        values = np.random.default_rng(0).standard_normal((2 * inner, hidden)).astype(np.float32)
        narrow = np.resize(values, (hidden, inner))
        started = time.perf_counter()
        for expert in range(self.experts):
            self.kernels.fill(self.banks[0], expert, 0, values)
            self.kernels.fill(self.banks[1], expert, 0, narrow)
        self.fill_rate = self.products / (time.perf_counter() - started)

    @property
    def products(self) -> int:
        return sum(self.experts * bank.rows * bank.cols for bank in self.banks)

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self.banks)

    def seconds(self, rows: int) -> float:
        """The best of three calls."""
        x = np.random.default_rng(rows).standard_normal((self.experts * rows, self.banks[0].cols)).astype(np.float32)
        counts, times = np.full(self.experts, rows, np.int64), []
        for _ in range(3):
            started = time.perf_counter()
            self.kernels.experts(x, counts, *self.banks)
            times.append(time.perf_counter() - started)
        return min(times)


def unit_of(isa: str, format: WeightFormat, probes: dict[str, float]) -> float:
    """Operations a second of the multiplier that a level uses for a format."""
    vector = "int8" if format.is_integer else "f32"
    tile = "amx_int8" if format.is_integer else "amx_bf16" if format == BF16 else "f32"
    return probes[tile if isa == "amx" else vector]


def measure(name: str, isas: list[str], rows: list[int], args: argparse.Namespace) -> list[list[str]]:
    """Lines of the table for one format."""
    format, shape = FORMATS[name], TINY if args.tiny else (HIDDEN, INNER, EXPERTS)
    layers = {isa: Layer(isa, args.threads, format, shape) for isa in isas}
    cells = {(isa, count): Cell() for isa in isas for count in rows}
    for number in range(args.rounds + 1):  # the first warms up
        limits = measure_limits(args.threads, rounds=1, probes=PROBES)
        probes = {rate.probe: rate.median for rate in limits.rates}
        for (isa, count), cell in cells.items():
            layer = layers[isa]
            seconds = layer.seconds(count)
            if number == 0:
                continue
            memory, compute = layer.nbytes / seconds, 2 * layer.products * count / seconds
            cell.rates.append((memory if count == 1 else compute) / 1e9)
            limit = probes["read"] if count == 1 else unit_of(isa, format, probes)
            cell.shares.append((memory if count == 1 else compute) / limit)
    return [[name, isa, f"{layers[isa].fill_rate / 1e6:.0f}", *(cells[isa, count].text() for count in rows)]
            for isa in isas]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", action="append", help="levels (default: all but generic)")
    parser.add_argument("--rows", action="append", type=int, help="rows of each expert (default: 1, 8, 48)")
    parser.add_argument("--format", action="append", choices=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=machine().threads)
    parser.add_argument("--tiny", action="store_true", help="small matrices: does it run")
    args = parser.parse_args()
    isas = args.isa or [level for level in machine().isa_levels if level != "generic"] or ["generic"]
    rows = args.rows or [1, 8, 48]
    units = ["GB/s, 1 row (of read)" if count == 1 else f"GOP/s, {count} rows (of unit)" for count in rows]
    lines = [line for name in args.format or FORMATS for line in measure(name, isas, rows, args)]
    print("\n".join(table(["weights", "level", "filled, M/s", *units], lines)))


if __name__ == "__main__":
    main()
