"""`coterie plan record`: count what a model's router asks for on a text, for `plan imbalance --skew FILE`.

Runs the engine with its own recorder, window by window, each a batch of its own. What windows differ by beyond chance
is the drift. The only command of `plan` beside `calibrate` that loads the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from coterie.cli.common import LoadProgress, engine_config, engine_options, error_console, model_folder
from coterie.cli.main import check_folder
from coterie.planner.skew import Skew, drift_of
from coterie.spec.errors import CoterieError

if TYPE_CHECKING:
    from coterie.engine.llm import LLM


@click.command()
@engine_options
@click.option(
    "--text",
    "texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="A text file; may be given several times.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 10_000_000), default=16384, show_default=True, help="Tokens to read at most."
)
@click.option("--window", type=click.IntRange(1, 1_000_000), default=512, show_default=True, help="Tokens of a batch.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file to write.")
def record(texts: tuple[Path, ...], tokens: int, window: int, out: Path, **values: Any) -> None:
    """Count what MODEL's router asks for on a text (none: the shipped model)."""
    from dataclasses import replace

    from coterie.engine.llm import LLM

    check_folder(out)
    config = replace(engine_config(values), enable_prefix_caching=False)
    with LoadProgress(error_console()) as progress:
        loaded = LLM(model_folder(values), config=config, progress=progress, record_experts=True)
    with loaded as llm:
        routed = list(llm.spec.moe_layers())
        if not routed:
            raise CoterieError(f"{llm.spec.model_type} has no MoE layer, so there is nothing to count")
        ids = [token for path in texts for token in llm.encode(path.read_text(encoding="utf-8", errors="replace"))]
        counts = windows_of(llm, ids[:tokens], window)
        width = drift_of(counts.astype(np.float64), routed[0][1].top_k)
    if not len(counts):
        raise CoterieError(f"the text has {len(ids)} tokens, less than a window of {window}")
    total = counts.sum(0)
    skew = Skew.of_counts(total)
    note = f"{len(counts)} windows of {window} tokens, recorded by coterie plan record"
    out.write_text(json.dumps({"source": note, "drift": round(width, 4), "counts": total.tolist()}) + "\n")
    hottest = (total.max(1) / total.mean(1)).mean()
    click.echo(
        f"{len(counts)} windows of {window} tokens, {skew.shape[0]} MoE layers of {skew.shape[1]} experts: the busiest "
        f"expert has {hottest:.2f} of the mean, drift between windows {width:.3f}; written to {out}"
    )


def windows_of(llm: LLM, ids: list[int], window: int) -> NDArray[np.int64]:
    """Counts [W, L, E] of the whole windows of a text; `llm` records experts."""
    counts = [llm.expert_counts()[None][:0]]
    for start in range(0, len(ids) - window + 1, window):
        before = llm.expert_counts()
        llm.logits(ids[start : start + window])
        counts.append((llm.expert_counts() - before)[None])
    return np.concatenate(counts)
