"""The routed experts of one MoE layer in a process of their own: the far end of `moe_layer.py`.

    python benchmarks/moe_workers.py ENGINE        (ENGINE: coterie, kt, torch)

JSON lines as in peer_workers.py. `load`: random bf16 weights from the seed, the same for every engine, in the engine's
type, and its error against float32 arithmetic on those weights. `run`: seconds of each of `rounds` forwards of `tokens`
rows with new random routing; forwards go round the loaded layers. From rows and routing to weighted sums: the router,
the shared expert and norms are left out everywhere.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peer_workers import rss
from worker_loop import answer_requests

ERROR_TOKENS = 8
STD = 0.02
POOL_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class Shape:
    """experts E, top_k K, hidden H, inner I."""

    experts: int
    top_k: int
    hidden: int
    inner: int


class Weights:
    """Matrices as float32 values that bf16 holds exactly: runs out of one pool, by (layer, expert, part)."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        values = np.random.default_rng(seed).standard_normal(POOL_VALUES, np.float32) * np.float32(STD)
        self._pool = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def part(self, layer: int, expert: int, part: int) -> NDArray[np.float32]:
        """0 gate [I, H], 1 up [I, H], 2 down [H, I]."""
        shape = self.shape
        rows, cols = (shape.hidden, shape.inner) if part == 2 else (shape.inner, shape.hidden)
        random = np.random.default_rng([self.seed, layer, expert, part])
        out = np.empty(rows * cols, np.float32)
        at = 0
        while at < len(out):
            start = int(random.integers(POOL_VALUES // 2))
            run = min(len(out) - at, POOL_VALUES - start)
            out[at : at + run] = self._pool[start : start + run]
            at += run
        return out.reshape(rows, cols)

    def rows(self, tokens: int, number: int) -> NDArray[np.float32]:
        values = np.random.default_rng([self.seed, 7, tokens, number]).standard_normal(
            (tokens, self.shape.hidden), np.float32
        )
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def routing(self, tokens: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct experts of each token, even; weights that add up to 1."""
        random = np.random.default_rng([self.seed, 8, tokens, number])
        ids = np.argsort(random.random((tokens, self.shape.experts)), axis=1)[:, : self.shape.top_k]
        weights = random.random((tokens, self.shape.top_k)).astype(np.float32) + np.float32(0.5)
        return np.ascontiguousarray(ids), weights / weights.sum(1, keepdims=True)


class Coterie:
    """Ours through the device door: sort, gather, experts, combine. `kind`: bf16, int8, int4, mxfp4, fp8."""

    def __init__(self, weights: Weights, layers: int, config: dict[str, Any]) -> None:
        from coterie.kernels.select import select
        from coterie.spec.weights import MatrixSpec, QuantPlan

        shape = self.shape = weights.shape
        self.kernels, _ = select("native", threads=config["threads"], isa=config.get("isa", "auto"))
        form = QuantPlan(config["kind"], group=config.get("group", "auto")).format(config["kind"])
        assert form is not None
        matrices = (
            MatrixSpec(2 * shape.inner, shape.hidden, form, segments=2), MatrixSpec(shape.hidden, shape.inner, form)
        )  # fmt: skip
        self.layers = [self.kernels.allocate(shape.experts, *matrices) for _ in range(layers)]
        for layer, (gate_up, down) in enumerate(self.layers):
            for expert in range(shape.experts):
                self.kernels.fill(gate_up, expert, 0, weights.part(layer, expert, 0))
                self.kernels.fill(gate_up, expert, shape.inner, weights.part(layer, expert, 1))
                self.kernels.fill(down, expert, 0, weights.part(layer, expert, 2))
        self.nbytes = sum(bank.nbytes for bank in self.layers[0])

    def prepare(self, rows: Any, ids: Any, weights: Any) -> Any:
        return rows, ids.astype(np.int32), weights

    def forward(self, layer: int, prepared: Any) -> Any:
        rows, ids, weights = prepared
        order = self.kernels.sort_by_expert(ids, self.shape.experts)
        out = self.kernels.experts(self.kernels.gather(rows, order), order.counts, *self.layers[layer])
        return self.kernels.combine(out, order.position, weights, None)

    def to_numpy(self, out: Any) -> NDArray[np.float32]:
        return np.asarray(out, np.float32)


class Kt:
    """kt-kernel's CPU classes, weights quantised by itself. `kind`: AMXINT8, AMXINT4. Its workers spin and want cores
    of their own, so torch gets one thread."""

    def __init__(self, weights: Weights, layers: int, config: dict[str, Any]) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        import kt_kernel
        import torch

        self.torch, extension = torch, kt_kernel.kt_kernel_ext
        shape = weights.shape
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [config["threads"]]
        self.infer = extension.CPUInfer(pool)
        cls = {"AMXINT8": "AMXInt8_MOE", "AMXINT4": "AMXInt4_MOE"}[config["kind"]]
        self.layers, self.shape = [], shape
        self.mask, order = torch.zeros(shape.experts, dtype=torch.bool), torch.arange(shape.experts)
        for layer in range(layers):
            parts = [
                torch.stack([torch.from_numpy(weights.part(layer, e, part)).bfloat16() for e in range(shape.experts)])
                for part in range(3)
            ]
            settings = extension.moe.MOEConfig(
                shape.experts, shape.top_k, shape.hidden, shape.inner, self.mask.data_ptr()
            )
            settings.layer_idx, settings.pool, settings.max_len = layer, self.infer.backend_, 1024
            settings.gate_proj, settings.up_proj, settings.down_proj = (part.data_ptr() for part in parts)
            made = getattr(extension.moe, cls)(settings)
            self.infer.submit(made.load_weights_task(order.data_ptr()))
            self.infer.sync()
            self.layers.append(made)
        values = 3 * shape.experts * shape.hidden * shape.inner
        self.nbytes = values if config["kind"] == "AMXINT8" else values // 2

    def prepare(self, rows: Any, ids: Any, weights: Any) -> Any:
        count = self.torch.tensor([len(rows)], dtype=self.torch.int32)
        out = self.torch.empty(rows.shape, dtype=self.torch.bfloat16)
        tensors = (self.torch.from_numpy(rows).bfloat16(), self.torch.from_numpy(ids), self.torch.from_numpy(weights))
        return (count, *tensors, out)

    def forward(self, layer: int, prepared: Any) -> Any:
        count, rows, ids, weights, out = prepared
        pointers = (tensor.data_ptr() for tensor in (ids, weights, rows, out))
        self.infer.submit(self.layers[layer].forward_task(count.data_ptr(), self.shape.top_k, *pointers, False))
        self.infer.sync()
        return out

    def to_numpy(self, out: Any) -> NDArray[np.float32]:
        return out.float().numpy()


class Torch:
    """Plain torch in bf16, one expert after another; for machines without kt-kernel."""

    def __init__(self, weights: Weights, layers: int, config: dict[str, Any]) -> None:
        import torch

        self.torch, self.shape = torch, weights.shape
        torch.set_num_threads(config["threads"])
        self.layers = [
            [[torch.from_numpy(weights.part(layer, expert, part)).bfloat16() for part in range(3)]
             for expert in range(weights.shape.experts)]
            for layer in range(layers)
        ]  # fmt: skip
        self.nbytes = 2 * 3 * self.shape.experts * self.shape.hidden * self.shape.inner

    def prepare(self, rows: Any, ids: Any, weights: Any) -> Any:
        return tuple(self.torch.from_numpy(value) for value in (rows, ids, weights))

    def forward(self, layer: int, prepared: Any) -> Any:
        rows, ids, weights = prepared
        linear, out, x = self.torch.nn.functional.linear, self.torch.zeros_like(rows), rows.bfloat16()
        for expert in ids.unique().tolist():
            gate, up, down = self.layers[layer][expert]
            token, slot = self.torch.where(ids == expert)
            hidden = self.torch.nn.functional.silu(linear(x[token], gate)) * linear(x[token], up)
            out.index_add_(0, token, linear(hidden, down).float() * weights[token, slot, None])
        return out

    def to_numpy(self, out: Any) -> NDArray[np.float32]:
        return out.float().numpy()


ENGINES = {"coterie": Coterie, "kt": Kt, "torch": Torch}


def exact(weights: Weights, number: int) -> NDArray[np.float32]:
    """The layer in float32 arithmetic on the bf16 weights."""
    rows = weights.rows(ERROR_TOKENS, number)
    ids, scale = weights.routing(ERROR_TOKENS, number)
    out = np.zeros_like(rows)
    for expert in np.unique(ids):
        gate, up, down = (weights.part(0, int(expert), part) for part in range(3))
        token, slot = np.nonzero(ids == expert)
        x = rows[token]
        gated = x @ gate.T
        hidden = gated / (1 + np.exp(-gated)) * (x @ up.T)
        np.add.at(out, token, (hidden @ down.T) * scale[token, slot, None])
    return out


class Worker:
    """Turns requests into calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.weights = Weights(Shape(*request["shape"]), request["seed"])
        begin = time.perf_counter()
        self.engine = ENGINES[self.name](self.weights, request["layers"], request["config"])
        seconds = time.perf_counter() - begin
        expected = exact(self.weights, 0)
        prepared = self.engine.prepare(self.weights.rows(ERROR_TOKENS, 0), *self.weights.routing(ERROR_TOKENS, 0))
        found = self.engine.to_numpy(self.engine.forward(0, prepared))
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        return {"load_s": seconds, "error_to_f32": error, "nbytes": self.engine.nbytes, "rss": rss()}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens, seconds = request["tokens"], []
        for number in range(request["rounds"] + 1):
            key = 1000 * request["seed"] + number
            prepared = self.engine.prepare(self.weights.rows(tokens, key), *self.weights.routing(tokens, key))
            begin = time.perf_counter()
            self.engine.forward(number % len(self.engine.layers), prepared)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds[1:], "rss": rss()}


if __name__ == "__main__":
    answer_requests(lambda: Worker(sys.argv[1]))
