"""The loss plot of a run as a PNG (matplotlib, no display)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.train.checkpoint import Point


def plot_history(history: Sequence[Point], tokens_per_step: int, file: Path) -> None:
    """Draw both losses (a light line per step, a running mean over it) against tokens seen, and the load violation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    tokens = np.array([point.step + 1 for point in history]) * tokens_per_step / 1e6
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    losses, balance = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, values, colour in (
        ("next token", [point.loss for point in history], "tab:blue"),
        ("token after it (MTP)", [point.mtp_loss for point in history], "tab:orange"),
    ):
        losses.plot(tokens, values, color=colour, alpha=0.25, linewidth=0.8)
        losses.plot(tokens, _running_mean(values), color=colour, label=name)
    losses.set_ylabel("training loss, nats per token")
    losses.legend()
    losses.grid(alpha=0.3)
    balance.plot(tokens, _running_mean([point.violation for point in history]), color="tab:green")
    balance.set_ylabel("MaxVio per step")
    balance.set_xlabel("million tokens")
    balance.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def _running_mean(values: Sequence[float]) -> np.ndarray:
    size = max(1, min(20, len(values) // 5))
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - size, 0)
    mean: np.ndarray = (sums[ends] - sums[starts]) / (ends - starts)
    return mean
