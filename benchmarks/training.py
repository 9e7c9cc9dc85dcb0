"""Training speed of the demo recipe on this machine, beside what its matrix products alone could reach.

    python benchmarks/training.py --data runs/demo/data [--steps 24]

Prints the median tokens per second of whole optimiser steps (the first third warms up) and the share of this machine's
bf16 matrix rate, measured before and after by torch on a 2048 x 1024 x 1024 product. `coterie train prepare demo --data
runs/demo/data` fetches the text. Run it on a quiet machine; it needs the `train` extra.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from coterie.cli.train import ENVIRONMENT
from coterie.train.config import load_recipe
from coterie.train.data import prepare
from coterie.train.trainer import Trainer


def matrix_rate(seconds: float = 2.0) -> float:
    """Multiply-adds x 2 per second of a bf16 product in torch."""
    import torch

    a, b = torch.randn(2048, 1024, dtype=torch.bfloat16), torch.randn(1024, 1024, dtype=torch.bfloat16)
    rates, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        a @ b
        rates.append(2 * 2048 * 1024 * 1024 / (time.perf_counter() - begin))
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    if not all(name in os.environ for name in ENVIRONMENT):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    recipe = load_recipe("demo")
    trainer = Trainer(recipe, prepare(recipe, arguments.data, Path(), lambda _: None), 1000)
    before = matrix_rate()
    speeds = [trainer.step().tokens_per_second for _ in range(arguments.steps)]
    measured = speeds[len(speeds) // 3 :]
    peak = statistics.mean([before, matrix_rate()])
    spec, length = trainer.spec, recipe.schedule.stages[0].length
    per_token = 3 * (spec.flops_per_token(length // 2) + 2 * spec.num_mtp_parameters)  # forward and backward
    speed = statistics.median(measured)
    print(f"{speed:,.0f} tokens/s (median of {len(measured)} steps, {min(measured):,.0f} .. {max(measured):,.0f})")
    share = speed * per_token / peak
    print(f"bf16 products in torch: {peak / 1e9:,.0f} GFLOP/s; the step uses at most {share:.0%} of it")


if __name__ == "__main__":
    main()
