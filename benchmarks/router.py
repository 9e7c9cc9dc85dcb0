"""Router and top-k: one fused call against the same rule written as separate array operations in numpy and in torch.

    python benchmarks/router.py [--threads 2] [--rounds 15]

Shapes of DeepSeek-V2-Lite (64 experts, softmax, top 6, H 2048) and V3 (256 experts, sigmoid + correction bias, 4 of 8
groups, top 8, H 7168), random weights, 1, 32 and 512 tokens. "router" includes the float32 gate product; "choice" does
not (the gate is one column wide, the others are given logits). The three run in turn in every round; tokens per second
are medians, and all three must choose the same experts. It needs torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.spec.model import MoESpec
from coterie.spec.weights import F32, MatrixSpec

V2_LITE = MoESpec(64, 6, 1408, scale_normalized=True)
V3 = MoESpec(
    256, 8, 2048, "sigmoid", True, 8, 4, "top2_sum", normalize=True, norm_epsilon=1e-20, routed_scaling_factor=2.5
)
MODELS = (("V2-Lite", V2_LITE, 2048), ("V3", V3, 7168))
TOKENS = (1, 32, 512)
Choice = tuple[np.ndarray, np.ndarray]


def numpy_choice(logits: np.ndarray, bias: np.ndarray | None, spec: MoESpec) -> Choice:
    """Scores, group mask, top-k and weights, one array operation after the other."""
    if spec.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        raised = np.exp(logits - logits.max(1, keepdims=True))
        scores = raised / raised.sum(1, keepdims=True)
    biased = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        grouped = biased.reshape(len(biased), spec.num_groups, -1)
        group_scores = np.partition(grouped, -2, axis=2)[:, :, -2:].sum(2)
        dropped = np.argpartition(-group_scores, spec.topk_groups, axis=1)[:, spec.topk_groups :]
        grouped = grouped.copy()
        np.put_along_axis(grouped, dropped[:, :, None], -np.inf, axis=1)
        biased = grouped.reshape(biased.shape)
    ids = np.argpartition(-biased, spec.top_k, axis=1)[:, : spec.top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if spec.normalize:
        weights = weights / (weights.sum(1, keepdims=True) + spec.norm_epsilon)
    return ids, weights * spec.routed_scaling_factor


def torch_choice(logits: torch.Tensor, bias: torch.Tensor | None, spec: MoESpec) -> Choice:
    """The same as model code for torch writes it."""
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(1)
    biased = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        grouped = biased.view(len(biased), spec.num_groups, -1)
        kept = grouped.topk(2, dim=2)[0].sum(2).topk(spec.topk_groups, dim=1, sorted=False)[1]
        mask = torch.zeros_like(grouped[:, :, 0]).scatter_(1, kept, 1).unsqueeze(2).expand(grouped.shape)
        biased = biased.masked_fill(mask.reshape(biased.shape) == 0, float("-inf"))
    ids = biased.topk(spec.top_k, dim=1, sorted=False)[1]
    weights = scores.gather(1, ids)
    if spec.normalize:
        weights = weights / (weights.sum(1, keepdim=True) + spec.norm_epsilon)
    return ids.numpy(), (weights * spec.routed_scaling_factor).numpy()


def contenders(
    kernels: NativeKernels, spec: MoESpec, tokens: int, hidden: int | None
) -> dict[str, Callable[[], Choice]]:
    """fused, numpy and torch on the same inputs; `hidden` None: logits are given."""
    rng = np.random.default_rng(tokens)
    width = hidden or 1
    gate = (rng.standard_normal((spec.num_experts, width)) / np.sqrt(width)).astype(np.float32)
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    bias = (rng.standard_normal(spec.num_experts) * 0.01).astype(np.float32) if spec.correction_bias else None
    (bank,) = kernels.allocate(1, MatrixSpec(*gate.shape, F32))
    kernels.fill(bank, 0, 0, gate)
    logits = x @ gate.T
    t_x, t_gate, t_logits = torch.from_numpy(x), torch.from_numpy(gate), torch.from_numpy(logits)
    t_bias = None if bias is None else torch.from_numpy(bias)
    return {
        "fused": lambda: tuple(kernels.route(x, bank, bias, spec)),  # type: ignore[dict-item]
        "numpy": lambda: numpy_choice(x @ gate.T if hidden else logits, bias, spec),
        "torch": lambda: torch_choice(t_x @ t_gate.T if hidden else t_logits, t_bias, spec),
    }


def seconds(call: Callable[[], Choice]) -> float:
    """One call's time, over as many calls as fill about 20 ms."""
    begin = time.perf_counter()
    call()
    count = max(1, int(0.02 / (time.perf_counter() - begin)))
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def check_same(calls: dict[str, Callable[[], Choice]]) -> None:
    """The same experts with the same weights, but for logits whose rounding decides."""
    chosen = {name: call() for name, call in calls.items()}
    sorted_ids = {name: np.sort(ids, axis=1) for name, (ids, _) in chosen.items()}
    for name in ("numpy", "torch"):
        assert np.mean((sorted_ids[name] == sorted_ids["fused"]).all(1)) > 0.99, name
        assert np.allclose(np.sort(chosen[name][1].sum(1)), np.sort(chosen["fused"][1].sum(1)), rtol=1e-3), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=machine().threads)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = NativeKernels(arguments.threads)
    print(f"{machine()}, {kernels.isa}, {arguments.threads} threads, medians of {arguments.rounds} rounds, tokens/s\n")
    print("| router | measured | tokens | fused | numpy | torch | fused / numpy | fused / torch |")
    print("|---|---|---|---|---|---|---|---|")
    for name, spec, hidden in MODELS:
        for label, width in (("router", hidden), ("choice", None)):
            for tokens in TOKENS:
                calls = contenders(kernels, replace(spec), tokens, width)
                check_same(calls)
                times: dict[str, list[float]] = {key: [] for key in calls}
                for _ in range(arguments.rounds):
                    for key, call in calls.items():
                        times[key].append(seconds(call))
                rate = {key: tokens / statistics.median(values) for key, values in times.items()}
                ratios = [statistics.median(np.divide(times[peer], times["fused"])) for peer in ("numpy", "torch")]
                cells = [f"{rate[key]:,.0f}" for key in calls] + [f"{ratio:.1f}" for ratio in ratios]
                print(f"| {name}, {spec.num_experts} | {label} | {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
