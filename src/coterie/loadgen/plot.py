"""A run as a PNG: first tokens and whole answers over time, tokens a second, and how gaps and first tokens spread."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coterie.loadgen.report import values_of
from coterie.loadgen.run import Load


def plot_load(load: Load, title: str, file: Path) -> None:
    """Draw a run. Needs matplotlib; raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure

    good = [record for record in load.records if record.ok]
    bad = [record for record in load.records if record.error is not None]
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    (times, rate), (first, gaps) = figure.subplots(2, 2)
    for label, pick in (("first token", values_of("ttft", good)), ("whole answer", values_of("e2el", good))):
        sent = [record.sent - load.started for record in good if label != "first token" or record.news]
        times.plot(sent, pick, ".", markersize=3, label=label)
    times.plot([record.sent - load.started for record in bad], [0.0] * len(bad), "rx", label="failed")
    times.set(xlabel="sent, s", ylabel="s")
    times.legend()
    news = np.array([stamp - load.started for record in load.records for stamp in record.news])
    seconds = max(1, int(np.ceil(load.ended - load.started)))
    counts, edges = np.histogram(news, bins=min(200, max(10, seconds)), range=(0.0, float(seconds)))
    rate.step(edges[:-1], counts / (edges[1] - edges[0]), where="post")
    rate.set(xlabel="s", ylabel="pieces of news a second")
    for axes, metric, label in ((first, "ttft", "time to first token, ms"), (gaps, "itl", "gap between news, ms")):
        values = 1e3 * np.sort(values_of(metric, good))
        if len(values):
            axes.plot(values, np.arange(1, len(values) + 1) / len(values))
            axes.set_xscale("log")
        axes.set(xlabel=label, ylabel="share of all")
    for axes in (times, rate, first, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110, format="png")
