"""`coterie bench`: limits of the machine, latency of one case, throughput over several batch sizes, load on a server.

Tables for people, `--json` for programs; what each number means is in docs/benchmarks.md. Flags and words only:
measuring is `engine/bench.py`, counting `engine/traffic.py`, the machine `engine/limits.py`. `serve` is
in `cli/bench_serve.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from coterie.cli.bench_serve import serve
from coterie.cli.common import (
    AT_LEAST_ONE,
    THREADS,
    LoadProgress,
    engine_config,
    engine_options,
    error_console,
    model_folder,
    plain_table,
    size,
)
from coterie.cli.main import debug_option
from coterie.engine.bench import BenchEngine, Case, CaseResult, Stretch
from coterie.engine.build import ModelFiles, open_model
from coterie.engine.limits import Limits, Rate, measure_limits
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError

BATCHES = "1,4,16"
_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
UNITS = {
    "read": "reading memory, huge pages", "read_4k": "reading memory, 4 KiB pages", "copy": "copying, read + written",
    "f32": "float32 multiply-add", "int8": "int8 dot product", "amx_int8": "AMX int8", "amx_bf16": "AMX bfloat16",
}  # fmt: skip


class Numbers(click.ParamType):
    """Whole numbers of at least 1, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        parts = str(value).split(",")
        if not all(_NUMBER.fullmatch(part) and int(part) > 0 for part in parts):
            self.fail(f"'{value}' is not a list of whole numbers above 0, as in 1,4,16", param, ctx)
        return [int(part) for part in parts]


def case_options(function: Any) -> Any:
    """The flags that `latency` and `throughput` share."""
    options = (
        click.option("--prompt-len", type=AT_LEAST_ONE, default=512, show_default=True, help="Tokens of a prompt."),
        click.option("--context", type=AT_LEAST_ONE, default=128, show_default=True,
                     help="Tokens in the cache of each stream when decode is measured."),
        click.option("--decode-len", type=AT_LEAST_ONE, default=32, show_default=True, help="Steps of one round."),
        click.option("--rounds", type=AT_LEAST_ONE, default=3, show_default=True, help="Rounds; medians are shown."),
        click.option("--seed", "prompt_seed", type=click.IntRange(min=0), default=0, show_default=True,
                     help="Of the random prompts."),
        click.option("--layers", type=AT_LEAST_ONE, help="Only the first layers of the model (dummy weights only)."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.group()
def bench() -> None:
    """Measure this machine, the engine on it, or a running server.

    \b
    coterie bench limits
    coterie bench latency ./model --prompt-len 512 --context 128
    coterie bench throughput ./DeepSeek-V2-Lite --load-format dummy --layers 8 --batches 1,16
    coterie bench serve http://127.0.0.1:8000 --request-rate 4
    """


bench.add_command(serve)


@bench.command()
@click.option("--threads", "-t", type=THREADS, help="Threads. [default: the cores we may use]")
@click.option("--rounds", type=AT_LEAST_ONE, default=9, show_default=True, help="Rounds; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@debug_option
def limits(threads: int | None, rounds: int, as_json: bool) -> None:
    """Measure reading and copying memory and the peak of each multiplier, with one thread and with all."""
    found = measure_limits(threads, rounds=rounds, single=True)
    if as_json:
        click.echo(json.dumps(limits_report(found)))
        return
    table = plain_table("limit", "threads", "median", "lowest", "highest")
    for rate in sorted(found.rates, key=lambda rate: (list(UNITS).index(rate.probe), rate.threads)):
        shown = [speed(rate, value) for value in (rate.median, min(rate.values), max(rate.values))]
        table.add_row(UNITS[rate.probe], str(rate.threads), *shown)
    console = Console(highlight=False)
    console.print(table, f"memory was measured on arrays of {size(found.array_bytes)}")


@bench.command()
@engine_options
@case_options
@click.option("--batch", type=AT_LEAST_ONE, default=1, show_default=True, help="Streams that decode together.")
def latency(**values: Any) -> None:
    """Measure one case: a prompt alone, then --batch streams that decode together.

    MODEL is a folder (none: the shipped model); with --load-format dummy a config.json is enough.
    """
    case = Case(
        prompt_len=values["prompt_len"], context=values["context"], decode_len=values["decode_len"],
        batch=values["batch"], rounds=values["rounds"], seed=values["prompt_seed"],
    )  # fmt: skip
    engine = start(values, [case])
    result = measure(engine, [case])[0]
    report = {**engine_report(engine), **case_report(result)}
    if values["as_json"]:
        click.echo(json.dumps(report))
        return
    show(engine, [result], report)


@bench.command()
@engine_options
@case_options
@click.option("--batches", type=Numbers(), default=BATCHES, show_default=True, help="Batch sizes, with commas.")
def throughput(**values: Any) -> None:
    """Measure prefill and decode at several batch sizes: as many prompts together as streams.

    MODEL is a folder (none: the shipped model); with --load-format dummy a config.json is enough.
    """
    cases = [
        Case(
            prompt_len=values["prompt_len"], context=values["context"], decode_len=values["decode_len"],
            batch=batch, prompts=batch, rounds=values["rounds"], seed=values["prompt_seed"],
        )
        for batch in values["batches"]
    ]  # fmt: skip
    engine = start(values, cases)
    results = measure(engine, cases)
    report = {**engine_report(engine), "cases": [case_report(result) for result in results]}
    if values["as_json"]:
        click.echo(json.dumps(report))
        return
    show(engine, results, report)


def start(values: Mapping[str, Any], cases: list[Case]) -> BenchEngine:
    """Load the model with room for the cases, showing progress."""
    config, files = engine_config(values), model_files(values)
    with LoadProgress(error_console()) as progress:
        return BenchEngine(files, config, cases, progress)


def model_files(values: Mapping[str, Any]) -> ModelFiles:
    """The model that was asked for: a folder, the shipped one, or a config.json alone for dummy weights."""
    dummy, strict = values["load_format"] == "dummy", values["strict"]
    given = values["model"] or values["model_option"]
    if dummy and given is not None and Path(given).is_file():
        try:
            files = open_model(json.loads(Path(given).read_bytes()), strict=strict)
        except ValueError as error:
            raise CoterieError(f"{given} is not a config.json: {error}") from error
    else:
        files = open_model(model_folder(values) or shipped_model_path(), strict=strict)
    if values["layers"] is None:
        return files
    if not dummy:
        raise CoterieError("--layers cuts a model short, which files cannot be read for; add --load-format dummy")
    if values["layers"] > len(files.spec.layers):
        raise CoterieError(f"--layers {values['layers']}: the model has {len(files.spec.layers)}")
    return replace(files, spec=replace(files.spec, layers=files.spec.layers[: values["layers"]], mtp_layers=()))


def measure(engine: BenchEngine, cases: Sequence[Case]) -> list[CaseResult]:
    """Run the cases one after the other, saying on stderr what is being done."""
    console = error_console()
    if not console.is_terminal:
        return [engine.run(case, lambda line: console.print(line, soft_wrap=True)) for case in cases]
    with console.status("measuring") as status:
        return [engine.run(case, status.update) for case in cases]


# Reports


def engine_report(engine: BenchEngine) -> dict[str, Any]:
    """What holds for every case."""
    return {
        "model_type": engine.traffic.spec.model_type,
        "num_layers": len(engine.traffic.spec.layers),
        "num_parameters": engine.traffic.spec.num_parameters,
        "num_active_parameters": engine.traffic.spec.num_active_parameters,
        "choices": {choice.what: choice.value for choice in engine.info.report},
        "threads": engine.threads,
        "load_s": engine.load_seconds,
        "first_token_s": engine.first_token_seconds,
        "peak_rss_bytes": engine.peak_rss(),
        "weight_bytes": engine.traffic.weight_bytes,
        "weight_kinds": engine.traffic.kinds(),
        "cache_bytes": engine.traffic.cache_bytes,
        "cache_bytes_per_token": engine.traffic.cache_bytes_per_token,
    }


def case_report(result: CaseResult) -> dict[str, Any]:
    """One case, with the limits measured between its rounds."""
    case, limits = result.case, result.limits
    return {
        "prompt_len": case.prompt_len,
        "prompts": case.prompts,
        "context": case.context,
        "decode_len": case.decode_len,
        "batch": case.batch,
        "rounds": case.rounds,
        "decode_tok_s": result.decode_rate,
        "prefill_tok_s": result.prefill_rate,
        "bandwidth_fraction": result.bandwidth_fraction(result.decode),
        "matrix_fraction": result.matrix_fraction(result.prefill),
        "prefill_floor_fraction": result.floor_fraction(result.prefill),
        "decode_floor_fraction": result.floor_fraction(result.decode),
        "read_bandwidth_bytes_s": result.bandwidth,
        "prefill": stretch_report(result.prefill),
        "decode": stretch_report(result.decode),
        "limits": limits_report(limits),
    }


def stretch_report(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """The rounds of one kind; bytes, operations and stages are a step's means over all rounds."""
    steps = sum(stretch.work.steps for stretch in stretches)
    rows = sum(stretch.work.cached_rows for stretch in stretches)
    hits = [sum(stretch.work.hits.values()) / len(stretch.work.hits) for stretch in stretches if stretch.work.hits]
    return {
        "tok_s": [stretch.rate for stretch in stretches],
        "step_s": sum(stretch.seconds for stretch in stretches) / steps,
        "bytes_per_step": sum(stretch.need.nbytes for stretch in stretches) / steps,
        "operations_per_step": {
            kind: sum(stretch.need.operations[kind] for stretch in stretches) / steps
            for kind in stretches[0].need.operations
        },
        "context_rows_per_step": rows / steps,
        "experts_hit_per_layer": sum(hits) / steps if hits else None,
        "stage_s": stage_means(stretches),
    }


def stage_means(stretches: Sequence[Stretch]) -> dict[str, float]:
    """Seconds a step spends in each stage."""
    steps = sum(stretch.work.steps for stretch in stretches)
    return {
        name: sum(stretch.stage_seconds[name] for stretch in stretches) / steps for name in stretches[0].stage_seconds
    }


def limits_report(limits: Limits) -> dict[str, Any]:
    """Medians and every value, by probe and threads."""
    return {
        "array_bytes": limits.array_bytes,
        "rates": [
            {"probe": rate.probe, "threads": rate.threads, "median": rate.median, "values": list(rate.values)}
            for rate in limits.rates
        ],
    }


def speed(rate: Rate, value: float) -> str:
    """A rate for people."""
    if rate.is_memory:
        return f"{value / 1e9:.1f} GB/s"
    return f"{value / 1e12:.2f} T/s" if value >= 1e12 else f"{value / 1e9:.0f} G/s"


def show(engine: BenchEngine, results: Sequence[CaseResult], report: Mapping[str, Any]) -> None:
    """Print the tables: speeds, seconds per stage, memory."""
    console = Console(highlight=False)
    speeds = plain_table("batch", "prefill", "of floor", "of matrix", "decode", "ms/step", "of memory", "GB/s")
    for result in results:
        step = stretch_report(result.decode)["step_s"]
        speeds.add_row(
            str(result.case.batch), f"{result.prefill_rate:.1f}", percent(result.floor_fraction(result.prefill)),
            percent(result.matrix_fraction(result.prefill)), f"{result.decode_rate:.2f}", f"{1e3 * step:.2f}",
            percent(result.bandwidth_fraction(result.decode)), f"{result.bandwidth / 1e9:.1f}",
        )  # fmt: skip
    console.print(speeds, "prefill and decode in tokens a second; floor: memory or matrix, whichever takes longer")
    columns = [f"{kind} {result.case.batch}" for result in results for kind in ("prefill", "decode")]
    stages = plain_table("stage, ms a step", *columns)
    means = [stage_means(stretches) for result in results for stretches in (result.prefill, result.decode)]
    for name in means[0]:
        stages.add_row(name, *(f"{1e3 * mean[name]:.2f}" for mean in means))
    console.print(stages)
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in report["weight_kinds"].items())
    console.print(
        f"{engine.threads} threads, isa {report['choices'].get('isa', 'none')}; loaded in {report['load_s']:.1f} s; "
        f"weights {size(report['weight_bytes'])} ({kinds}), cache {size(report['cache_bytes'])}, "
        f"peak memory {size(report['peak_rss_bytes'])}"
    )


def percent(fraction: float) -> str:
    """A share for people."""
    return f"{100 * fraction:.0f} %"
