"""Skewed routing on live ranks: what placement, copies and splitting give back, and what the slot map costs.

    python benchmarks/ep_skew.py [--tokens 8 --tokens 64] [--skew 0 ... --skew 1] [--ranks 8] [--redundant 16]
    python benchmarks/ep_skew.py --map

Ranks are those of one process (`comm.local`): real router, exchange, split and expert kernels of V2-Lite's shape in 4
bit, one rank after the other with the whole machine, so that each is timed alone. A step's time is that of its critical
path: in every layer the slowest rank of each stage. Each batch is computed REPEATS times and the least of a stage
counts, since what else runs on the machine only adds. The router's correction bias is fitted so that expert r of a
layer (in an order of its own) is chosen as often as Zipf's law r^-s says, as far as a token's K different experts allow
it. Gamma is the busiest over the mean, of experts and of ranks ("Gamma_acc"), in rows, a mean over layers and steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from balancer_inputs import assignments
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from coterie.comm.exchange import Exchange
from coterie.comm.local import LocalTransport
from coterie.comm.mesh import Mesh
from coterie.comm.slots import SlotTable
from coterie.comm.transport import Handle
from coterie.comm.travel import Travel
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive_all
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts
from coterie.moe.layer import MoELayer
from coterie.moe.router import Router
from coterie.observe.stages import StageTimer
from coterie.spec.balance import Room, place
from coterie.spec.model import MoESpec
from coterie.spec.placement import ExpertPlacement
from coterie.spec.weights import F32, INT4_TABLE, MatrixSpec, WeightFormat

CODE4 = WeightFormat("code4", 32, table=INT4_TABLE)
STAGES = ("router", "dispatch", "experts", "combine")
MAPS = (("V2-Lite", 26, 64, 6, 8, 0), ("V2-Lite", 26, 64, 6, 8, 16),
        ("V3", 58, 256, 8, 32, 0), ("V3", 58, 256, 8, 32, 32))  # fmt: skip
"""Name, MoE layers, experts, top-k, ranks, redundant experts."""
FIT_TOKENS, FIT_ROUNDS = 8192, 400
REPEATS = 4
LOAD_STEPS = 4
"""Steps whose counts a placement is made for; other steps are measured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A deployment: `tokens` of each rank in a step."""

    ranks: int = 8
    experts: int = 64
    top_k: int = 6
    hidden: int = 2048
    inner: int = 1408
    layers: int = 2
    redundant: int = 16
    tokens: int = 64

    @property
    def moe(self) -> MoESpec:
        return MoESpec(self.experts, self.top_k, self.inner, scoring="sigmoid", correction_bias=True, normalize=True)


def fitted_bias(skew: float, shape: Shape) -> NDArray[np.float32]:
    """Correction bias [E], most popular expert first, with which logits of N(0, 1) choose experts by Zipf's law."""
    rng = np.random.default_rng(7)
    scores = 1 / (1 + np.exp(-rng.standard_normal((FIT_TOKENS, shape.experts))))
    weights = np.arange(1.0, shape.experts + 1) ** -skew
    wanted = assignments(weights[None], 1, shape.top_k)[0]
    bias = np.zeros(shape.experts)
    for turn in range(FIT_ROUNDS):
        chosen = np.argpartition(-(scores + bias), shape.top_k - 1, 1)[:, : shape.top_k]
        share = np.bincount(chosen.reshape(-1), minlength=shape.experts) / FIT_TOKENS
        bias += 0.1 * 0.99**turn * np.log((wanted + 1e-3) / (share + 1e-3))
    return (bias - bias.mean()).astype(np.float32)


Banks = dict[int, list[Experts]]


class Equal:
    """Rows divided equally among the copies of an expert, whatever the ranks have besides: what EPLB assumes."""

    def __init__(self, table: SlotTable) -> None:
        self._copies, self._number = table.copies, table.num_copies

    def whole(self, counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Rows per expert [E] -> rows per slot [S]."""
        slots = np.zeros(int(self._copies.max()) + 1, np.int64)
        for index in range(self._copies.shape[1]):
            has = self._copies[:, index] >= 0
            rows = counts // self._number + (index < counts % self._number)
            slots[self._copies[has, index]] = rows[has]
        return slots


class Counted:
    """A rank's experts, and how many rows they were given."""

    def __init__(self, experts: Experts) -> None:
        self.experts, self.rows = experts, 0

    def forward(self, rows: Any, counts: Any) -> Any:
        """As the experts do."""
        self.rows = len(rows)
        return self.experts.forward(rows, counts)


class Bench:
    """Routers, weights and inputs that all variants share."""

    def __init__(self, shape: Shape, skew: float, kernels: NativeKernels, banks: Banks) -> None:
        self.shape, self.kernels, self.banks = shape, kernels, banks
        rng = np.random.default_rng(1)
        bias, self.routers = fitted_bias(skew, shape), list[Router]()
        for _ in range(shape.layers):
            (gate,) = kernels.allocate(1, MatrixSpec(shape.experts, shape.hidden, F32))
            values = rng.standard_normal((shape.experts, shape.hidden), np.float32) / np.float32(shape.hidden**0.5)
            kernels.fill(gate, 0, 0, values)
            self.routers.append(Router(shape.moe, gate, kernels.vector(rng.permutation(bias)), kernels))
        lengths = np.array([shape.tokens])
        self.batch = kernels.prepare(ForwardBatch.packed(np.zeros(shape.tokens, np.int32), lengths))

    def inputs(self, step: int, layer: int) -> list[NDArray[np.float32]]:
        """Rows of each rank."""
        rng = np.random.default_rng([2, step, layer])
        shape = (self.shape.tokens, self.shape.hidden)
        return [rng.standard_normal(shape, np.float32) for _ in range(self.shape.ranks)]

    def counts(self, step: int, layer: int) -> NDArray[np.int64]:
        """Rows per expert of all ranks [E]."""
        ids = [self.routers[layer].route(x).expert_ids for x in self.inputs(step, layer)]
        return np.bincount(np.concatenate(ids).reshape(-1), minlength=self.shape.experts)

    def load(self) -> NDArray[np.int64]:
        """Counts [L, E] of the steps that placements are made for."""
        layers = range(self.shape.layers)
        return np.stack([sum(self.counts(step, layer) for step in range(LOAD_STEPS)) for layer in layers])  # type: ignore[misc]


class Variant:
    """Live ranks under one placement."""

    def __init__(self, bench: Bench, placement: ExpertPlacement, *, equal: bool = False) -> None:
        self.bench, self.placement = bench, placement
        self.critical, self.busy, self.gamma = list[float](), list[float](), list[float]()
        shape, kernels = bench.shape, bench.kernels
        self.timers = [StageTimer() for _ in range(shape.ranks)]
        self.experts = [Counted(experts) for experts in bench.banks[placement.slots_per_rank]]
        self.layers = list[list[MoELayer]]()
        for rank, world in enumerate(LocalTransport.group(shape.ranks)):
            exchange = Exchange(Mesh.of(world, placement.node_of_rank), placement)
            exchange.live.computed = lambda *words: None  # type: ignore[method-assign]  # equal ranks: no noise
            for table in exchange.tables:
                if equal and table.has_copies:
                    table._split = Equal(table)  # type: ignore[assignment]
            travel = Travel(kernels, self.experts[rank].experts.gate_up)
            self.layers.append(
                [
                    MoELayer(layer, router, Dispatcher(shape.experts, kernels, exchange, layer, travel),
                             self.experts[rank], None, None, kernels, self.timers[rank])  # type: ignore[arg-type]
                    for layer, router in enumerate(bench.routers)
                ]
            )  # fmt: skip

    def layer(self, inputs: list[NDArray[np.float32]], layer: int) -> NDArray[np.float64]:
        """One layer of all ranks; returns the milliseconds of each rank's stages [R, stages]."""
        before = self._totals()
        drive_all([self._rank(rank, layer, x) for rank, x in enumerate(inputs)])
        return self._totals() - before

    def note(self, times: list[NDArray[np.float64]]) -> None:
        """Keep a step's times, by layer."""
        self.critical.append(float(sum(spent.max(0).sum() for spent in times)))
        self.busy.append(float(sum(spent.sum() for spent in times)))

    def note_rows(self) -> None:
        """Keep how level the layer's rows were that was computed last."""
        rows = [experts.rows for experts in self.experts]
        self.gamma.append(max(rows) / statistics.mean(rows))

    def _totals(self) -> NDArray[np.float64]:
        return np.array([[timer.totals_ns[stage] for stage in STAGES] for timer in self.timers]) / 1e6

    def _rank(self, rank: int, layer: int, x: Any) -> Generator[Handle, None, Any]:
        self.timers[rank].start()
        return (yield from self.layers[rank][layer].stages(x, self.bench.batch))


def make_banks(shape: Shape, kernels: NativeKernels) -> Banks:
    """For each number of slots that a rank may have, every rank's experts, in memory of their own as in a deployment.
    One expert's values are drawn, the others are copies of its bytes; the layers share them."""
    gate_up, down = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(size, np.float32) / np.float32(size[1] ** 0.5) for size in (gate_up, down)]
    banks: Banks = {}
    for slots in sorted({shape.experts // shape.ranks, (shape.experts + shape.redundant) // shape.ranks}):
        banks[slots] = []
        for _ in range(shape.ranks):
            pair = kernels.allocate(slots, MatrixSpec(*gate_up, CODE4, 2), MatrixSpec(*down, CODE4))
            for bank, matrix in zip(pair, values, strict=True):
                kernels.fill(bank, 0, 0, matrix)
            units = kernels.units(pair[0])
            units[1:] = units[0]
            banks[slots].append(Experts(*pair, kernels))
    return banks


def variants(bench: Bench) -> dict[str, Variant]:
    """Without copies in order and placed for the load; copies in order; copies placed, split equally and by level."""
    shape, load = bench.shape, bench.load()
    order = ExpertPlacement.linear(shape.layers, shape.experts, shape.ranks)
    slots = shape.experts + shape.redundant
    copies = ExpertPlacement.linear(shape.layers, shape.experts, shape.ranks, num_slots=slots)
    placed = place(load, Room(num_slots=slots, num_ranks=shape.ranks))
    return {
        "in order": Variant(bench, order),
        "placed": Variant(bench, place(load, Room(num_slots=shape.experts, num_ranks=shape.ranks))),
        "copies in order, split": Variant(bench, copies),
        "copies placed, equal": Variant(bench, placed, equal=True),
        "copies placed, split": Variant(bench, placed),
    }


def run_step(found: dict[str, Variant], bench: Bench, number: int) -> None:
    """One step of every variant, in turns, so that a slow moment of the machine is everybody's."""
    times: dict[str, list[NDArray[np.float64]]] = {name: [] for name in found}
    for layer in range(bench.shape.layers):
        inputs = bench.inputs(number, layer)
        least = {name: np.full((bench.shape.ranks, len(STAGES)), np.inf) for name in found}
        for _ in range(REPEATS):
            for name, variant in found.items():
                least[name] = np.minimum(least[name], variant.layer(inputs, layer))
        for name, variant in found.items():
            times[name].append(least[name])
            variant.note_rows()
    for name, variant in found.items():
        variant.note(times[name])


def measure_skew(shape: Shape, skews: list[float], steps: int, console: Console) -> None:
    """One table: a row per skew and variant."""
    kernels = NativeKernels(machine().threads)
    banks = make_banks(shape, kernels)
    table = Table("s", "Gamma expert", "placement", "Gamma_acc", "step ms", "in order / this", "work of all ranks",
                  title=f"{shape.ranks} ranks, {shape.tokens} tokens each, {shape.experts} experts top-{shape.top_k}, "
                  f"{shape.redundant} redundant, isa {kernels.isa}, {kernels.threads} threads")  # fmt: skip
    for skew in skews:
        bench = Bench(shape, skew, kernels, banks)
        found = variants(bench)
        experts = []
        for step in range(LOAD_STEPS, LOAD_STEPS + steps):
            run_step(found, bench, step)
            for layer in range(shape.layers):
                counts = bench.counts(step, layer)
                experts.append(counts.max() / counts.mean())
        base = found["in order"]
        for name, variant in found.items():
            ratios = [a / b for a, b in zip(base.critical, variant.critical, strict=True)]
            work = [a / b for a, b in zip(variant.busy, base.busy, strict=True)]
            table.add_row(f"{skew:g}", f"{statistics.mean(experts):.2f}", name, f"{statistics.mean(variant.gamma):.2f}",
                          f"{statistics.median(variant.critical):.1f}", f"{statistics.median(ratios):.2f}",
                          f"{statistics.median(work) - 1:+.1%}")  # fmt: skip
        table.add_section()
    console.print(table)


def timed(work: Any, least: float = 0.2) -> float:
    """Seconds of one call, the best of three runs of at least `least` seconds in all."""
    best = np.inf
    for _ in range(3):
        calls, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < least / 3 or not calls:
            work()
            calls += 1
        best = min(best, spent / calls)
    return best


def measure_map(console: Console) -> None:
    """Look-up of slots for a batch, and the exchange of one layer's and of all layers' map, by shape."""
    table = Table("shape", "slots", "tokens", "look-up us/layer", "ns/token", "one layer's map us",
                  "all layers' maps ms", "lines of 64 B")  # fmt: skip
    for name, layers, experts, top_k, ranks, redundant in MAPS:
        rng = np.random.default_rng(0)
        load = assignments(np.exp(rng.normal(0, 1, (layers, experts))), 4096, top_k).astype(np.int64)
        slots = experts + redundant
        placement = place(load, Room(num_slots=slots, num_ranks=ranks))
        exchange = Exchange(Mesh.of(LocalTransport.group(ranks)[0], placement.node_of_rank), placement)
        layer = timed(lambda: exchange.install_layer(3, placement.slot_to_expert[3]))  # noqa: B023
        whole = timed(lambda: exchange.install(placement))  # noqa: B023
        for tokens in (1, 32, 512):
            ids = np.argsort(rng.random((tokens, experts)), 1)[:, :top_k].astype(np.int32)
            gathered = np.tile(np.bincount(ids.reshape(-1), minlength=experts), (ranks, 1))
            look = timed(lambda: exchange.tables[3].assign(ids, 0, gathered, gathered[0]))  # noqa: B023
            width = exchange.tables[3].copies.shape[1]
            lines = -(-4 * width // 64) * experts
            table.add_row(name, str(slots), str(tokens), f"{look * 1e6:.1f}", f"{look / tokens * 1e9:.0f}",
                          f"{layer * 1e6:.0f}", f"{whole * 1e3:.1f}",
                          f"{lines} a layer ({width} copies at most)")  # fmt: skip
        table.add_section()
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", action="store_true", help="only the slot map")
    parser.add_argument("--tokens", type=int, action="append", help="of each rank; default 8 and 64")
    parser.add_argument("--skew", type=float, action="append", help="default 0, 0.2, ... 1")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--redundant", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1408)
    given = parser.parse_args()
    console = Console(width=150)
    if given.map:
        measure_map(console)
        return
    for tokens in given.tokens or [8, 64]:
        shape = Shape(ranks=given.ranks, redundant=given.redundant, layers=given.layers, tokens=tokens,
                      hidden=given.hidden, inner=given.inner)  # fmt: skip
        measure_skew(shape, given.skew or [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], given.steps, console)


if __name__ == "__main__":
    main()
