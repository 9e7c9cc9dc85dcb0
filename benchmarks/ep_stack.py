"""A stack of MoE layers over an exchange, as ep_worker.py runs it: how much communication hides under compute.

Each layer is a stand-in for attention and the real MoE layer (`moe.layer`: router, dispatch, experts, combine). Compute
either sleeps, as the host of a device that works by itself does, or is real: products and experts of the kernels.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.comm.exchange import Exchange, FormPolicy
from coterie.comm.mesh import Mesh
from coterie.comm.transport import Handle
from coterie.comm.travel import Travel
from coterie.kernels.api import Array, Prepared
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive, interleave
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts
from coterie.moe.layer import MoELayer
from coterie.moe.router import Router
from coterie.observe.stages import StageTimer
from coterie.observe.trace import Trace, chrome_events, coverage
from coterie.spec.model import MoESpec
from coterie.spec.placement import ExpertPlacement
from coterie.spec.weights import BF16, F32, MatrixSpec, WeightFormat

FORMATS = {"float32": BF16, "int8": WeightFormat("int8", 32, "f16")}
"""Of the experts, by what their rows are on the way out (bf16 weights take float32 rows where no tiles round them)."""


@dataclass(frozen=True, slots=True)
class Sleeping:
    """Experts or attention of a device that leaves the host idle for `seconds`; rows of `hidden` values come back as
    they are, of narrow ones the codes."""

    seconds: float
    hidden: int

    def forward(self, rows: Array, counts: Array) -> Array:
        """Rows unchanged, later."""
        time.sleep(self.seconds)
        return rows if rows.dtype == np.float32 else rows[:, : self.hidden].view(np.int8) / np.float32(127)


@dataclass(frozen=True, slots=True)
class Products:
    """Attention's place: `repeats` products with one [H, H] matrix, whose result is thrown away."""

    kernels: NativeKernels
    weight: Any
    repeats: int

    def forward(self, rows: Array, counts: Array) -> Array:
        """Rows unchanged, after real work."""
        for _ in range(self.repeats):
            self.kernels.linear(rows, self.weight)
        return rows


Attention = Sleeping | Products


class Stack:
    """`layers` MoE layers of one rank. seconds None: real compute, of `inner` columns an expert."""

    def __init__(self, mesh: Mesh, placement: ExpertPlacement, policy: FormPolicy, request: dict[str, Any]) -> None:
        self.kernels = NativeKernels(1)
        self.timer = StageTimer(Trace(mesh.world.rank))
        mesh.world.stamp_ends = True  # type: ignore[attr-defined]
        self.hidden, self.top_k, self.experts = request["hidden"], request["top_k"], placement.num_experts
        self.num_layers, self.inner, self.repeats = request["layers"], request["inner"], request["repeats"]
        self.format = FORMATS[request["out"]]
        self.exchange = Exchange(mesh, placement, policy)
        self.rng = np.random.default_rng(mesh.world.rank)
        shared = np.random.default_rng(1)  # the routers are the same on all ranks
        self.gate = self._bank(1, self.experts, self.hidden, shared)
        self.square = self._bank(1, self.hidden, self.hidden, self.rng)
        self.banks = self._experts(placement.slots_per_rank)
        narrow = self.banks.gate_up if request["out"] != "float32" else None
        self.travel = Travel(self.kernels, narrow, rounded=request["back"] == "bfloat16")

    def _bank(self, count: int, rows: int, cols: int, rng: np.random.Generator) -> Any:
        (bank,) = self.kernels.allocate(count, MatrixSpec(rows, cols, F32))
        for index in range(count):
            self.kernels.fill(bank, index, 0, (rng.normal(size=(rows, cols)) / np.sqrt(cols)).astype(np.float32))
        return bank

    def _experts(self, count: int) -> Experts:
        gate_up, down = self.kernels.allocate(
            count,
            MatrixSpec(2 * self.inner, self.hidden, self.format, 2),
            MatrixSpec(self.hidden, self.inner, self.format),
        )
        for bank, rows, cols in ((gate_up, 2 * self.inner, self.hidden), (down, self.hidden, self.inner)):
            values = (self.rng.normal(size=(rows, cols)) / np.sqrt(cols)).astype(np.float32)
            for index in range(count):
                self.kernels.fill(bank, index, 0, values)
        return Experts(gate_up, down, self.kernels)

    def stack(self, compute: str, seconds: float, *, alone: bool) -> tuple[Attention, list[MoELayer]]:
        """Attention and layers. compute "none", "sleep" or "real"; alone: without any exchange."""
        attention: Attention = Products(self.kernels, self.square, self.repeats)
        experts: Any = self.banks
        if compute != "real":
            attention = experts = Sleeping(seconds / 2 if compute == "sleep" else 0.0, self.hidden)
        elif alone:  # as many rows as arrive from all ranks, through the experts that are here
            experts = Folded(self.banks, self.experts // self.exchange.mesh.world.size)
        router = Router(MoESpec(self.experts, self.top_k, self.inner, scoring="softmax"), self.gate, None, self.kernels)
        layers = []
        for layer in range(self.num_layers):
            dispatcher = Dispatcher(self.experts, self.kernels, None if alone else self.exchange, 0, self.travel)
            layers.append(MoELayer(layer, router, dispatcher, experts, None, None, self.kernels, self.timer))
        return attention, layers

    def micro_batch(
        self, x: Array, batch: Prepared, stack: tuple[Attention, list[MoELayer]]
    ) -> Generator[Handle, None, Array]:
        """Rows through the stack."""
        attention, layers = stack
        for layer in layers:
            x = attention.forward(x, batch.ones_counts)
            self.timer.lap("attention", layer.layer)
            x = yield from layer.stages(x, batch)
        return x

    def run(self, stack: tuple[Attention, list[MoELayer]], tokens: int, *, overlapped: bool) -> tuple[float, Any]:
        """Seconds of a step of two micro-batches, one after the other or in turns, and its result."""
        rows = np.random.default_rng([5, self.exchange.mesh.world.rank]).normal(size=(tokens, self.hidden))
        halves = np.array_split(rows.astype(np.float32), 2)
        batches = [self.kernels.prepare(ForwardBatch.packed(np.zeros(len(h), np.int32), np.array([len(h)])))
                   for h in halves]  # fmt: skip
        stages = [self.micro_batch(half, batch, stack) for half, batch in zip(halves, batches, strict=True)]
        self.exchange.mesh.world.all_gather(np.zeros(1, np.int64)).result()
        self.timer.start()
        began = time.monotonic()
        if overlapped:
            out = drive(interleave(stages, self.timer.enter))
        else:
            out = []
            for index, half in enumerate(stages):
                self.timer.enter(index)
                out.append(drive(half))
        return time.monotonic() - began, np.concatenate(out)

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of communication alone, of compute alone, of both in sequence and overlapped, round by round; of the
        last overlapped round the share of communication under compute, and its trace if asked for."""
        compute, seconds, tokens = request["compute"], request["seconds"], request["tokens"]
        whole = self.stack(compute, seconds, alone=False)
        forms = {
            "comm": (self.stack("none", 0.0, alone=False), False),
            "compute": (self.stack(compute, seconds, alone=True), False),
            "sequence": (whole, False),
            "overlap": (whole, True),
        }
        times: dict[str, list[float]] = {name: [] for name in forms}
        outputs: dict[str, Any] = {}
        for _ in range(request["rounds"] + 1):  # the first warms up
            for name, (stack, overlapped) in forms.items():
                assert self.timer.trace is not None
                self.timer.trace.clear()
                spent, outputs[name] = self.run(stack, tokens, overlapped=overlapped)
                times[name].append(spent)
        if not np.array_equal(outputs["sequence"], outputs["overlap"]):
            raise AssertionError("overlapped and sequential results differ")
        spans = self.timer.trace.spans()
        events = chrome_events(self.exchange.mesh.world.rank, spans) if request["trace"] else []
        return {**{name: spent[1:] for name, spent in times.items()}, "hidden": coverage(spans).hidden, "trace": events}


@dataclass(frozen=True, slots=True)
class Folded:
    """This rank's experts in the place of all: expert e is computed by the bank's e modulo `count`."""

    experts: Experts
    count: int

    def forward(self, rows: Array, counts: Array) -> Array:
        """Rows sorted by expert through the experts that are here, in as many calls as there are ranks."""
        parts, start = [], 0
        for group in counts.reshape(-1, self.count):
            end = start + int(group.sum())
            parts.append(self.experts.forward(rows[start:end], np.ascontiguousarray(group)))
            start = end
        return np.concatenate(parts)
