"""Counts of a model's experts on a text, by the engine's own recorder, and how well the planner's imbalance fits them.

    python benchmarks/expert_counts.py [MODEL] [--text FILE] [--tokens 16384] [--window 512] [--ranks 8] [--out FILE]

The text (without FILE the project's pages, which the shipped model has not read) runs window by window, each a batch of
its own. `--out` writes the counts [MoE layers, experts] as JSON, which `coterie plan imbalance --skew FILE` reads. The
table sets the measured mean of the maximum (experts; ranks in order) beside what the planner draws from the sums, and
names the drift that a window shows. It counts and times nothing, so a busy machine does not disturb it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie import LLM
from coterie.engine.build import build_engine
from coterie.engine.config import EngineConfig
from coterie.model.shipped import shipped_model_path
from coterie.planner.imbalance import gamma
from coterie.planner.skew import Skew


def default_text() -> str:
    root = Path(__file__).resolve().parents[1]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def count(llm: LLM, text: str, tokens: int, window: int) -> np.ndarray:
    """Counts of each window [W, L, E]."""
    load = llm._open_core().runner.model.runtime.load
    ids, counts = llm.encode(text)[:tokens], []
    for start in range(0, len(ids) - window + 1, window):
        before = load.read()
        llm.logits(ids[start : start + window])
        counts.append(load.read() - before)
    return np.array(counts)


def busiest(counts: np.ndarray, ranks: int) -> float:
    """Mean over windows and layers of the busiest of `ranks` over the mean, experts in order."""
    loads = counts.reshape(*counts.shape[:2], ranks, -1).sum(-1)
    return float((loads.max(-1) / loads.mean(-1)).mean())


def drift(counts: np.ndarray, top_k: int) -> float:
    """Width of the lognormal factor by which windows differ beyond chance: experts that have 10 rows or more."""
    rows = counts.sum(-1, keepdims=True) / top_k
    share = counts.sum(0) / rows.sum(0)
    expected, chance = share * rows, share * (1 - share) * rows
    often = np.broadcast_to(expected >= 10, counts.shape)
    excess = ((counts - expected) ** 2 - chance)[often].sum() / (expected**2)[often].sum()
    return float(np.sqrt(np.log1p(max(excess, 0.0))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = options.model or shipped_model_path()
    llm = LLM.from_core(*build_engine(source, EngineConfig(enable_prefix_caching=False), record_experts=True))
    text = options.text.read_text(encoding="utf-8") if options.text else default_text()
    counts = count(llm, text, options.tokens, options.window)
    moe = next(llm.spec.moe_layers())[1]
    skew, width = Skew.of_counts(counts.sum(0)), drift(counts, moe.top_k)
    print(f"{len(counts)} windows of {options.window} tokens, {counts.shape[1]} MoE layers; drift {width:.3f}\n")
    print(f"| | busiest expert | busiest of {options.ranks} ranks in order |\n|---|---|---|")
    print(f"| measured | {busiest(counts, counts.shape[2]):.3f} | {busiest(counts, options.ranks):.3f} |")
    print(f"| the sums alone | {busiest(counts.sum(0)[None], counts.shape[2]):.3f} | "
          f"{busiest(counts.sum(0)[None], options.ranks):.3f} |")  # fmt: skip
    for name, one in (("planner", skew), (f"planner, drift {width:.3f}", replace(skew, drift=width))):
        found = gamma(one, llm.spec, options.window, options.ranks, "order")
        print(f"| {name} | {found.expert:.3f} | {found.rank:.3f} |")
    if options.out:
        options.out.write_text(json.dumps({"counts": counts.sum(0).tolist()}) + "\n")


if __name__ == "__main__":
    main()
