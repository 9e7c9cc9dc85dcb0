"""Counts of a model's experts on a text, by the engine's own recorder, and how well the planner's imbalance fits them.

    python benchmarks/expert_counts.py [MODEL] [--text FILE] [--tokens 16384] [--window 512] [--ranks 8]

The text (without FILE the project's pages, which the shipped model has not read) runs window by window, each a batch of
its own, as in `coterie plan record`. The table sets the measured mean of the maximum (experts; ranks in order) beside
what the planner draws from the sums, and names the drift that windows show. It counts and times nothing, so a busy
machine does not disturb it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie import LLM
from coterie.cli.plan_record import windows_of
from coterie.planner.imbalance import gamma
from coterie.planner.skew import Skew, drift_of


def default_text() -> str:
    root = Path(__file__).resolve().parents[1]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def busiest(counts: np.ndarray, ranks: int) -> float:
    """Mean over windows and layers of the busiest of `ranks` over the mean, experts in order."""
    loads = counts.reshape(*counts.shape[:2], ranks, -1).sum(-1)
    return float((loads.max(-1) / loads.mean(-1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    llm = LLM(options.model, enable_prefix_caching=False, record_experts=True)
    text = options.text.read_text(encoding="utf-8") if options.text else default_text()
    counts = windows_of(llm, llm.encode(text)[: options.tokens], options.window)
    moe = next(llm.spec.moe_layers())[1]
    skew, width = Skew.of_counts(counts.sum(0)), drift_of(counts, moe.top_k)
    print(f"{len(counts)} windows of {options.window} tokens, {counts.shape[1]} MoE layers; drift {width:.3f}\n")
    print(f"| | busiest expert | busiest of {options.ranks} ranks in order |\n|---|---|---|")
    print(f"| measured | {busiest(counts, counts.shape[2]):.3f} | {busiest(counts, options.ranks):.3f} |")
    print(f"| the sums alone | {busiest(counts.sum(0)[None], counts.shape[2]):.3f} | "
          f"{busiest(counts.sum(0)[None], options.ranks):.3f} |")  # fmt: skip
    for name, one in (("planner", skew), (f"planner, drift {width:.3f}", replace(skew, drift=width))):
        found = gamma(one, llm.spec, options.window, options.ranks, "order")
        print(f"| {name} | {found.expert:.3f} | {found.rank:.3f} |")


if __name__ == "__main__":
    main()
