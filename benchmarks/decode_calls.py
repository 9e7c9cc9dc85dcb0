"""Native calls, bytes and time of a decode step: fused ops against the single ops, in one run, in turn.

    python benchmarks/decode_calls.py [MODEL] [--steps 200] [--rounds 5]

One greedy stream of a model (default: the shipped one). Calls are counted by standing between the backend and its
extension; bytes are those of the banks (`engine/traffic.py`), experts as chosen. "outside" is the part of a step not
spent inside native calls: Python, the scheduler, the sampler, and the call's own way in and out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie import LLM, SamplingParams
from coterie.engine.traffic import Traffic, Work
from coterie.kernels import _native
from coterie.moe.layer import MoELayer


class Counter:
    """Counts and times calls into the extension."""

    def __init__(self, device: Any) -> None:
        self.device, self.calls, self.seconds = device, 0, 0.0
        self._known: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self.wrap(getattr(self.device, name))
        return self._known[name]

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            begin = time.perf_counter()
            out = call(*arguments)
            self.seconds += time.perf_counter() - begin
            self.calls += 1
            return out

        return counted


def decode(llm: LLM, steps: int, counter: Counter | None) -> tuple[float, float, float]:
    """(seconds of a step, calls of a step, seconds of it inside them), the prompt's step left out."""
    core = llm._open_core()
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    request = llm._start(list(range(10, 26)), params)
    llm._advance(request)
    if counter is not None:
        counter.calls, counter.seconds = 0, 0.0
    begin, done = time.perf_counter(), 0
    while not request.is_finished:
        llm._advance(request)
        done += 1
    assert not core.has_work
    total = (time.perf_counter() - begin) / done
    return total, *((0.0, 0.0) if counter is None else (counter.calls / done, counter.seconds / done))


def set_fused(llm: LLM, kept: list[tuple[Any, Any]], *, fused: bool) -> None:
    """Switch between the fused ops and the single ones, which mean the same."""
    for layer, (bound, moe) in zip(llm._open_core().runner.model.layers, kept, strict=True):
        object.__setattr__(layer.attention, "bound", bound if fused else None)
        if isinstance(layer.ffn, MoELayer):
            object.__setattr__(layer.ffn, "fused", moe if fused else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, enable_prefix_caching=False)
    runner = llm._open_core().runner
    model, kernels = runner.model, runner.model.runtime.kernels
    kept = [(layer.attention.bound, getattr(layer.ffn, "fused", None)) for layer in model.layers]
    device, sort = kernels._device, _native.sort_by_expert
    counter = Counter(device)
    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    plain: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(arguments.rounds):
        for fused in (True, False):
            set_fused(llm, kept, fused=fused)
            plain[fused].append(decode(llm, arguments.steps, None)[0])
            kernels._device, _native.sort_by_expert = counter, counter.wrap(sort)
            found[fused].append(decode(llm, arguments.steps, counter))
            kernels._device, _native.sort_by_expert = device, sort
    steps, layers = arguments.steps, len(model.layers)
    work = Work(steps, steps, steps, steps * (16 + steps // 2), 0)
    print(f"{layers} layers, {kernels.threads} threads, {kernels.isa}; bytes read a step: "
          f"{Traffic(model, runner.cache).need(work).nbytes / steps / 1e6:.2f} MB\n")  # fmt: skip
    print("| ops | native calls a step | a layer | step, us | outside native calls |\n|---|---|---|---|---|")
    for fused in (True, False):
        _, calls, inside = (statistics.median(values) for values in zip(*found[fused], strict=True))
        step = statistics.median(plain[fused])
        # embedding, final norm and head are three calls of no layer
        print(f"| {'fused' if fused else 'single'} | {calls:.1f} | {(calls - 3) / layers:.1f} | {step * 1e6:.0f} | "
              f"{1 - inside / step:.0%} |")  # fmt: skip


if __name__ == "__main__":
    main()
