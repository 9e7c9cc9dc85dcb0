"""What a router gate computed in bf16 instead of float32 changes: top-k sets that differ, and the effect on the output.

    python benchmarks/gate_precision.py [--text FILE] [--tokens 2048]

Part 1, the shipped model on real text (FILE; without it this project's README and design page, which the model has not
read): every layer's router sees the same inputs; "gate" rounds gate weights and inputs to
bf16 and adds in float32, "logits" rounds the logits to bf16 as well. Then the model runs with rounded gate weights, and
its bits per token and most likely tokens are compared. Part 2, a random gate of V2-Lite's and of V3's shape. It counts
and computes, it times nothing, so a busy machine does not disturb it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from coterie import LLM
from coterie.kernels.api import Routed
from coterie.kernels.native import NativeKernels
from coterie.spec.model import MoESpec
from coterie.spec.weights import F32, MatrixSpec

WINDOW = 512
V2_LITE = MoESpec(64, 6, 1408)
V3 = MoESpec(
    256, 8, 2048, "sigmoid", True, 8, 4, "top2_sum", normalize=True, norm_epsilon=1e-20, routed_scaling_factor=2.5
)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


class Flips:
    """Compares choices: rows whose set of experts differs, and how much routing weight went elsewhere."""

    def __init__(self) -> None:
        self.rows = self.flipped = 0
        self.moved = 0.0

    def add(self, exact: Routed, other: Routed) -> None:
        for ids, weights, theirs in zip(exact.expert_ids, exact.expert_weights, other.expert_ids, strict=True):
            lost = ~np.isin(ids, theirs)
            self.rows += 1
            self.flipped += bool(lost.any())
            self.moved += float(weights[lost].sum() / weights.sum())

    def cells(self) -> str:
        return f"{self.flipped / self.rows:.2%} of {self.rows:,} | {self.moved / self.rows:.3%}"


class Gate:
    """One router in float32 and in two forms of bf16."""

    def __init__(self, kernels: NativeKernels, weight: np.ndarray, bias: np.ndarray | None, spec: MoESpec) -> None:
        self.kernels, self.bias, self.spec = kernels, bias, spec
        self.exact, self.rounded = (self._bank(values) for values in (weight, to_bf16(weight)))
        self.one = self._bank(np.eye(spec.num_experts, dtype=np.float32))

    def _bank(self, values: np.ndarray) -> Any:
        (bank,) = self.kernels.allocate(1, MatrixSpec(*values.shape, F32))
        self.kernels.fill(bank, 0, 0, values)
        return bank

    def compare(self, x: np.ndarray, gate: Flips, logits: Flips) -> None:
        exact = self.kernels.route(x, self.exact, self.bias, self.spec)
        narrow = to_bf16(x)
        gate.add(exact, self.kernels.route(narrow, self.rounded, self.bias, self.spec))
        values = to_bf16(self.kernels.linear(narrow, self.rounded))
        logits.add(exact, self.kernels.route(values, self.one, self.bias, self.spec))


class Recorder:
    """Stands between the model and its backend and keeps what the routers see."""

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self.inputs: dict[int, list[np.ndarray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def route(self, x: np.ndarray, gate: Any, bias: Any, spec: MoESpec) -> Routed:
        self.inputs.setdefault(id(gate), []).append(x.copy())
        return self.kernels.route(x, gate, bias, spec)


def token_windows(llm: LLM, text: str, tokens: int) -> list[list[int]]:
    ids = llm.encode(text)[:tokens]
    return [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]


def nats(logits: np.ndarray, ids: list[int]) -> float:
    """Negative log-likelihood of a window's tokens but the first."""
    rows = logits[:-1].astype(np.float64)
    top = rows.max(1)
    total = np.log(np.exp(rows - top[:, None]).sum(1)) + top
    return float((total - rows[np.arange(len(rows)), ids[1:]]).sum())


def shipped_model(text: str, tokens: int) -> None:
    llm = LLM(enable_prefix_caching=False)
    windows = token_windows(llm, text, tokens)
    model = llm._open_core().runner.model
    layers = [layer.ffn for layer in model.layers if hasattr(layer.ffn, "router")]
    recorder = Recorder(model.runtime.kernels)
    for layer in layers:
        object.__setattr__(layer.router, "kernels", recorder)
    exact = [llm.logits(window) for window in windows]
    gate, logits = Flips(), Flips()
    print("| gate | rows whose top-k set differs | routing weight moved |\n|---|---|---|")
    for number, layer in enumerate(layers):
        router, (one, two) = layer.router, (Flips(), Flips())
        weight = recorder.read(router.gate, 0)
        for x in recorder.inputs[id(router.gate)]:
            form = Gate(recorder.kernels, weight, router.correction_bias, router.spec)
            form.compare(x, one, two)
            form.compare(x, gate, logits)
        print(f"| shipped model, MoE layer {number}, bf16 gate | {one.cells()} |")
    print(f"| shipped model, all layers, bf16 gate | {gate.cells()} |")
    print(f"| shipped model, all layers, bf16 gate and logits | {logits.cells()} |")
    for layer in layers:
        recorder.fill(layer.router.gate, 0, 0, to_bf16(recorder.read(layer.router.gate, 0)))
    narrow = [llm.logits(window) for window in windows]
    counted = sum(len(window) - 1 for window in windows)
    before, after = (sum(map(nats, all_logits, windows)) / counted / np.log(2) for all_logits in (exact, narrow))
    error = np.linalg.norm(np.concatenate(narrow) - np.concatenate(exact)) / np.linalg.norm(np.concatenate(exact))
    same = np.mean(np.concatenate(narrow).argmax(1) == np.concatenate(exact).argmax(1))
    print(f"\nThe model with bf16 gate weights, {counted} tokens: {before:.5f} -> {after:.5f} bits per token, "
          f"logits differ by {error:.2%}, the most likely token is the same in {same:.2%}")  # fmt: skip


def random_gates() -> None:
    kernels, rng = NativeKernels(1), np.random.default_rng(1)
    print("\n| random gate | rows whose top-k set differs | routing weight moved |\n|---|---|---|")
    for name, spec, hidden in (("V2-Lite, H 2048", V2_LITE, 2048), ("V3, H 7168", V3, 7168)):
        weight = (rng.standard_normal((spec.num_experts, hidden)) / np.sqrt(hidden)).astype(np.float32)
        bias = (rng.standard_normal(spec.num_experts) * 0.01).astype(np.float32) if spec.correction_bias else None
        gate, logits = Flips(), Flips()
        Gate(kernels, weight, bias, spec).compare(rng.standard_normal((2048, hidden)).astype(np.float32), gate, logits)
        print(f"| {name}, bf16 gate | {gate.cells()} |\n| {name}, bf16 gate and logits | {logits.cells()} |")


def default_text() -> str:
    root = Path(__file__).resolve().parents[1]
    return "\n".join((root / name).read_text() for name in ("README.md", "docs/design.md"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    shipped_model(arguments.text.read_text() if arguments.text else default_text(), arguments.tokens)
    random_gates()


if __name__ == "__main__":
    main()
