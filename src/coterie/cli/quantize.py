"""`coterie quantize`: a checkpoint to a packed folder that starts in seconds, with what it cost in accuracy.

Options to a `PackOptions`, progress, tables. The conversion is `model/packed_writer.py`, scores are
`engine/quality.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from coterie.cli.common import AT_LEAST_ONE, DEFAULTS, LoadProgress, choice, error_console, size
from coterie.cli.main import debug_option
from coterie.engine.build import open_model
from coterie.engine.config import EngineConfig
from coterie.engine.llm import LLM
from coterie.engine.memory import available_memory
from coterie.engine.quality import Scores, agreement, score
from coterie.kernels.native import NativeKernels
from coterie.kernels.select import select
from coterie.model.gguf_file import local_path
from coterie.model.packed_manifest import Manifest, PackedMatrix
from coterie.model.packed_writer import PackOptions, PackReport, pack
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError
from coterie.spec.weights import QuantPlan

WIDTH = 140
"""Of tables in a pipe, where nobody has a width."""


@click.command()
@click.argument("paths", nargs=-1, metavar="[MODEL] OUT")
@click.option("--experts", type=choice("experts"), default="int8", show_default=True,
              help="Feed-forward weights: routed and shared experts, dense layers.")
@click.option("--attention", type=choice("attention"), default="auto", show_default=True, help="Its projections.")
@click.option("--head", type=choice("head"), default="auto", show_default=True, help="The output head.")
@click.option("--group", type=choice("group"), default=DEFAULTS.quant.group, show_default=True,
              callback=lambda context, parameter, value: value if value == "auto" else int(value),
              help="Inputs that share a scale in int8 and int4 weights; auto: 128 in int8, 32 in int4.")
@click.option("--dtype", type=choice("dtype"), default="auto", show_default=True, help="Weights that stay unquantised.")
@click.option("--overwrite", is_flag=True, help="Replace a packed model in OUT, or an interrupted run.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Text to score before and after: bits per byte, perplexity, greedy agreement.")
@click.option("--max-file-bytes", type=AT_LEAST_ONE, default=4 << 30, show_default=True,
              help="A weight file ends before it would be longer; one layer's experts are never split.")
@click.option("--threads", "-t", type=AT_LEAST_ONE, help="Threads of the kernels. [default: the cores we may use]")
@click.option("--isa", type=choice("isa"), default="auto", show_default=True, help="The bytes written are the same.")
@debug_option
def quantize(paths: tuple[Path, ...], **values: Any) -> None:
    """Write MODEL (a folder or GGUF file; none: the shipped model) to the folder OUT, quantised and packed.

    OUT is a model folder like any other: `coterie serve OUT`. A run that was interrupted goes on where it ended.

    \b
    coterie quantize ./DeepSeek-V2-Lite ./v2-lite-int4 --experts int4 --attention int8
    """
    if not 1 <= len(paths) <= 2:
        raise click.UsageError("give the model and the folder to write, or only the latter for the shipped model")
    out = local_path(paths[-1])
    source = local_path(paths[0]) if len(paths) == 2 else Path(shipped_model_path())
    if not source.exists():
        raise CoterieError(f"there is no model {source}; give a folder with config.json and weights, or a GGUF file")
    if out.exists() and (not out.is_dir() or out.resolve() == source.resolve()):
        raise CoterieError(f"{out} cannot be written: it is {'the source' if out.is_dir() else 'a file'}")
    if values["text"] is not None and open_model(source).tokenizer is None:
        raise CoterieError("--text needs a model with a tokenizer")
    kernels, _ = select("native", threads=values["threads"], isa=values["isa"])
    assert isinstance(kernels, NativeKernels)
    options = PackOptions(
        quant=QuantPlan(values["experts"], values["attention"], values["head"], values["group"]),
        dtype=values["dtype"],
        max_file_bytes=values["max_file_bytes"],
        overwrite=values["overwrite"],
        available_memory=available_memory(),
    )
    with LoadProgress(error_console(), "quantising") as progress:
        report = pack(source, open_model(source).spec, kernels, out, options, progress)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    show(console, report, out)
    if values["text"] is not None:
        show_scores(console, source, out, values)


def show(console: Console, report: PackReport, out: Path) -> None:
    """Print what was written, the error of each kind of bank, and the worst of them."""
    manifest = report.manifest
    reused = f", {report.reused} of {report.jobs} steps kept from an earlier run" if report.reused else ""
    sizes = f"{size(manifest.nbytes)} from {size(report.source_bytes)}"
    console.print(f"{out}: {sizes} in {report.seconds:.1f} s{reused}", soft_wrap=True)
    table = Table("weights", "format", "banks", "bytes", "error", "worst", "where", box=None)
    for name, members in _by_kind(manifest).items():
        rounded = [matrix for matrix in members if matrix.error > 0]
        label = members[0].spec.format.label()
        nbytes = size(sum(matrix.spec.nbytes * _count(manifest, matrix) for matrix in members))
        if not rounded:
            table.add_row(name, label, str(len(members)), nbytes, "exact", "", "")
            continue
        mean = sum(matrix.error for matrix in rounded) / len(rounded)
        worst = max(rounded, key=lambda matrix: matrix.worst_error)
        place = f"{worst.key}[{worst.worst}]"
        table.add_row(name, label, str(len(members)), nbytes, f"{mean:.4f}", f"{worst.worst_error:.4f}", place)
    console.print(table)
    console.print("error: root of the squared error over the squared weights, mean of the banks", style="dim")


def _count(manifest: Manifest, matrix: PackedMatrix) -> int:
    return next(group.count for group in manifest.groups if matrix in group.matrices)


def _by_kind(manifest: Manifest) -> dict[str, list[PackedMatrix]]:
    """Banks that are alike but for their layer: `layers.3.ffn.down` counts as `ffn.down`."""
    found: dict[str, list[PackedMatrix]] = {}
    for key, matrix in manifest.matrices().items():
        parts = (part for part in key.split(".") if not part.isdigit())
        name = ".".join(part for part in parts if part not in ("layers", "mtp", "layer"))
        found.setdefault(f"{name} ({matrix.spec.format.label()})", []).append(matrix)
    return {name.rpartition(" (")[0]: members for name, members in found.items()}


def show_scores(console: Console, source: Path, out: Path, values: dict[str, Any]) -> None:
    """Score the text with the source and with what was written, one after the other, and print both."""
    text = values["text"].read_text(encoding="utf-8", errors="replace")
    scores: list[Scores] = []
    table = Table("model", "bits per byte", "perplexity", "tokens", "seconds", box=None)
    for path in (source, out):
        began = time.perf_counter()
        config = EngineConfig(threads=values["threads"], isa=values["isa"], max_model_len=None, max_running_requests=1)
        with LLM(str(path), config=config) as llm:
            found = score(llm, text)
        scores.append(found)
        row = (f"{found.bits_per_byte:.4f}", f"{found.perplexity:.3f}", str(found.tokens))
        table.add_row(str(path.name), *row, f"{time.perf_counter() - began:.1f}")
    console.print(table)
    console.print(f"same greedy token at {100 * agreement(*scores):.1f} % of the positions", soft_wrap=True)
