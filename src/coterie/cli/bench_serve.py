"""`coterie bench serve URL`: load against any OpenAI-compatible server, with the flags of vLLM's command of that name.

Flags, progress and the table; sending is `loadgen/run.py`, what the numbers mean is `loadgen/report.py` and
docs/benchmarks.md. Results go to stdout, progress to stderr; Ctrl-C shows what there is so far.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coterie.cli.common import AT_LEAST_ONE, FiniteRange, error_console, plain_table
from coterie.cli.main import check_folder, debug_option
from coterie.loadgen.client import CHAT, TEXT, Client
from coterie.loadgen.connection import Address
from coterie.loadgen.prompts import PromptPlan, cut_by_chars, cut_with_tokenizer, make_prompts, measure_chars
from coterie.loadgen.report import GOALS, METRICS, Wanted, details, make_report
from coterie.loadgen.run import Arrivals, Load, run_load
from coterie.spec.errors import CoterieError

GOAL = re.compile(rf"({'|'.join(GOALS)}):(\d+(?:\.\d+)?)")
LINE_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""
TITLES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "gap between news",
          "e2el": "whole answer"}  # fmt: skip


class ServeCommand(click.Command):
    """Takes `--goodput ttft:500 tpot:50` as vLLM does: all terms that follow belong to the flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        kept: list[str] = []
        inside = False
        for arg in args:
            if inside and not arg.startswith("-") and "/" not in arg:
                kept += ["--goodput", arg]
                continue
            inside = arg == "--goodput"
            if not inside:
                kept.append(arg)
        return super().parse_args(ctx, kept)


class Goal(click.ParamType):
    """metric:milliseconds."""

    name = "metric:ms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        found = GOAL.fullmatch(str(value))
        if found is None:
            self.fail(f"'{value}' is not one of {', '.join(GOALS)} with milliseconds, as in ttft:500", param, ctx)
        return found[1], float(found[2])


class Names(click.ParamType):
    """Names of metrics, separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else tuple(value)
        if not set(names) <= set(METRICS):
            self.fail(f"'{value}' is not a list of {', '.join(METRICS)} with commas", param, ctx)
        return names


class Percentiles(click.ParamType):
    """Numbers from 0 to 100, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if not isinstance(value, str):
            return tuple(value)
        with suppress(ValueError):
            numbers = tuple(float(part) for part in value.split(","))
            if all(0 <= number <= 100 for number in numbers):
                return numbers
        self.fail(f"'{value}' is not a list of percentiles with commas, as in 50,90,99", param, ctx)


class Rate(click.FloatRange):
    """A positive number or inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("nan is not a rate", param, ctx)
        return number


OPTIONS = (
    click.argument("url", required=False),
    click.option("--base-url", help="The same as URL."),
    click.option("--host", default="127.0.0.1", show_default=True, help="Of the server, if there is no URL."),
    click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True),
    click.option("--backend", type=click.Choice(["openai", "openai-chat"]), default="openai", show_default=True,
                 help="openai: /v1/completions. openai-chat: /v1/chat/completions."),
    click.option("--endpoint", help="Another path than the backend's."),
    click.option("--model", "-m", help="Name to ask for. [default: the first that the server lists]"),
    click.option("--api-key", envvar="OPENAI_API_KEY", help="[env: OPENAI_API_KEY]"),
    click.option("--header", multiple=True, metavar="NAME=VALUE", help="One more header; may be repeated."),
    click.option("--num-prompts", type=AT_LEAST_ONE, default=200, show_default=True, help="Requests."),
    click.option("--request-rate", type=Rate(0.0, min_open=True), default=math.inf, show_default=True,
                 help="Requests a second that arrive, whatever becomes of them; inf: all at once."),
    click.option("--burstiness", type=FiniteRange(0.0, min_open=True), default=1.0, show_default=True,
                 help="1: Poisson. Below: bursts. Above: steadier."),
    click.option("--max-concurrency", type=AT_LEAST_ONE, help="Requests in flight at most; the rest waits its turn."),
    click.option("--dataset-name", type=click.Choice(["text", "custom", "random"]), default="text", show_default=True,
                 help="text: windows of --dataset-path or of the shipped text. custom: JSON lines with `prompt`. "
                      "random: random ids, which no user sends."),
    click.option("--dataset-path", type=click.Path(path_type=Path), help="File of the text or of the JSON lines."),
    click.option("--tokenizer", type=click.Path(path_type=Path),
                 help="Folder with tokenizer.json: exact prompt lengths. [default: lengths by measured characters]"),
    click.option("--random-input-len", "--input-len", "input_len", type=AT_LEAST_ONE, default=512, show_default=True,
                 help="Tokens of a prompt."),
    click.option("--random-output-len", "--output-len", "output_len", type=AT_LEAST_ONE, default=128,
                 show_default=True, help="max_tokens."),
    click.option("--random-range-ratio", "range_ratio", type=FiniteRange(0.0, 1.0, max_open=True), default=0.0,
                 show_default=True, help="Lengths are uniform within this share around them."),
    click.option("--random-prefix-len", "prefix_len", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Tokens that all prompts begin with."),
    click.option("--random-vocab-size", "vocab_size", type=AT_LEAST_ONE, default=1000, show_default=True,
                 help="Random ids are below this."),
    click.option("--ignore-eos", is_flag=True, help="Always generate all tokens (servers that know it)."),
    click.option("--temperature", type=FiniteRange(min=0.0), help="[default: the server's]"),
    click.option("--extra-body", metavar="JSON", help="One JSON object whose fields are added to every request."),
    click.option("--num-warmups", type=click.IntRange(min=0), default=1, show_default=True,
                 help="Uncounted requests before, one at a time."),
    click.option("--request-timeout", type=FiniteRange(min=0.0, min_open=True), default=3600.0, show_default=True,
                 help="Seconds of one request."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and arrivals."),
    click.option("--percentile-metrics", type=Names(), default="ttft,tpot,itl,e2el", show_default=True),
    click.option("--metric-percentiles", type=Percentiles(), default="50,90,99", show_default=True),
    click.option("--goodput", type=Goal(), multiple=True, metavar="METRIC:MS ...",
                 help=f"Bounds that a good request keeps: {', '.join(GOALS)}, as in --goodput ttft:500 tpot:50."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
    click.option("--save-result", is_flag=True, help="Write the JSON object to a file as well."),
    click.option("--save-detailed", is_flag=True, help="With every request's times and text."),
    click.option("--result-dir", type=click.Path(path_type=Path), default=Path(), help="[default: here]"),
    click.option("--result-filename", help="[default: made of backend, rate, model and time]"),
    click.option("--plot", type=click.Path(path_type=Path), help="Draw a PNG (needs matplotlib)."),
    debug_option,
)  # fmt: skip


def add_options(function: Any) -> Any:
    """All flags of `bench serve`."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@click.command(cls=ServeCommand)
@add_options
def serve(**values: Any) -> None:
    """Load an OpenAI-compatible server and show what its users would see.

    \b
    coterie bench serve http://127.0.0.1:8000 --request-rate 4 --num-prompts 200
    coterie bench serve --max-concurrency 16 --goodput ttft:500 tpot:50 --json
    """
    check_folder(values["plot"])
    if values["plot"] is not None:
        import matplotlib  # noqa: F401  (said to be missing before the load, not after it)
    wanted = Wanted(values["percentile_metrics"], values["metric_percentiles"], values["goodput"])
    client = make_client(values)
    load = asyncio.run(measure(client, values))
    report = {**settings(client, values), **make_report(load, wanted)}
    if values["save_result"] or values["save_detailed"]:
        save(report | (details(load) if values["save_detailed"] else {}), values)
    if values["plot"] is not None:
        from coterie.loadgen.plot import plot_load

        plot_load(load, f"{client.model} at {client.pool.address.url}", values["plot"])
    if values["as_json"]:
        click.echo(json.dumps(report))
    else:
        show(report, wanted)
    if load.interrupted:
        raise KeyboardInterrupt
    if not report["completed"]:
        kinds = ", ".join(f"{kind}: {said}" for kind, said in report["error_examples"].items())
        raise CoterieError(f"no request succeeded ({kinds})")


def make_client(values: Mapping[str, Any]) -> Client:
    """The server that was asked for, and what every request says."""
    given = {value for value in (values["url"], values["base_url"]) if value is not None}
    if len(given) > 1:
        raise click.UsageError("two URLs were given; give one")
    address = Address.parse(given.pop() if given else f"http://{values['host']}:{values['port']}")
    headers = {}
    for text in values["header"]:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"'{text}' is not a header; write NAME=VALUE")
        headers[name] = value
    extra: dict[str, Any] = {}
    if values["ignore_eos"]:
        extra["ignore_eos"] = True
    if values["temperature"] is not None:
        extra["temperature"] = values["temperature"]
    if values["extra_body"] is not None:
        try:
            extra |= dict(json.loads(values["extra_body"]))
        except (ValueError, TypeError) as error:
            raise click.UsageError(f"--extra-body is not a JSON object: {error}") from error
    endpoint = values["endpoint"] or (CHAT if values["backend"] == "openai-chat" else TEXT)
    return Client(address, api_key=values["api_key"], headers=headers, endpoint=endpoint, model=values["model"],
                  extra=extra)  # fmt: skip


async def measure(client: Client, values: Mapping[str, Any]) -> Load:
    """Find the model, make the prompts, warm up, run. Ctrl-C ends the run, not the program."""
    console = error_console()
    client.model = client.model or await client.find_model()
    plan = PromptPlan(
        source=values["dataset_name"], path=values["dataset_path"], count=values["num_prompts"],
        input_len=values["input_len"], output_len=values["output_len"], range_ratio=values["range_ratio"],
        prefix_len=values["prefix_len"], vocab_size=values["vocab_size"], seed=values["seed"],
    )  # fmt: skip
    cut = None
    if plan.source == "text" and values["tokenizer"] is not None:
        cut = cut_with_tokenizer(values["tokenizer"])
    elif plan.source == "text":
        chars, found = await measure_chars(client, plan.path)
        console.print(f"{chars:.2f} characters a token ({found})", soft_wrap=True)
        cut = cut_by_chars(chars)
    prompts = make_prompts(plan, cut)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not on the main thread
        loop.add_signal_handler(signal.SIGINT, stop.set)
    if values["num_warmups"]:
        warm = Arrivals(max_concurrency=1, timeout=values["request_timeout"])
        others = make_prompts(PromptPlan(source=plan.source, path=plan.path, count=values["num_warmups"],
                                         input_len=plan.input_len, output_len=min(plan.output_len, 8),
                                         vocab_size=plan.vocab_size, seed=plan.seed + 1), cut)  # fmt: skip
        await run_load(client, others, warm, stop=stop)
    arrivals = Arrivals(rate=values["request_rate"], burstiness=values["burstiness"], seed=values["seed"],
                        max_concurrency=values["max_concurrency"], timeout=values["request_timeout"])  # fmt: skip
    load = Load(len(prompts))
    watching = asyncio.create_task(watch(load, console))
    try:
        return await run_load(client, prompts, arrivals, load=load, stop=stop)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def watch(load: Load, console: Console) -> None:
    """Show how far a run is: a bar on a terminal, else a line every few seconds."""
    bar = Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"),
                   console=console, transient=True, disable=not console.is_terminal)  # fmt: skip
    task = bar.add_task("", total=load.total, state="")
    before, at = 0, time.monotonic()
    rate = 0.0
    with bar:
        while True:
            await asyncio.sleep(0.5 if console.is_terminal else LINE_SECONDS)
            now = time.monotonic()
            rate, before, at = (load.news - before) / (now - at), load.news, now
            state = f"{load.running} running, {load.failed} failed, {rate:.0f} tok/s"
            bar.update(task, completed=load.done, state=state)
            if not console.is_terminal:
                console.print(f"{load.done} of {load.total} done, {state}", soft_wrap=True)


# Reports


def settings(client: Client, values: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for."""
    finite = not math.isinf(values["request_rate"])
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": values["backend"],
        "base_url": client.pool.address.url,
        "endpoint": client.endpoint,
        "model_id": client.model,
        "dataset_name": values["dataset_name"],
        "input_len": values["input_len"],
        "output_len": values["output_len"],
        "request_rate": values["request_rate"] if finite else "inf",
        "burstiness": values["burstiness"],
        "max_concurrency": values["max_concurrency"],
        "seed": values["seed"],
    }


def save(report: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the JSON file and say where."""
    model = str(report["model_id"]).rpartition("/")[2]
    name = f"{report['backend']}-{report['request_rate']}qps-{model}-{report['date']}.json"
    file = values["result_dir"] / (values["result_filename"] or name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report) + "\n")
    error_console().print(f"written to {file}", soft_wrap=True)


def show(report: Mapping[str, Any], wanted: Wanted) -> None:
    """Print counts, rates and the table of percentiles."""
    console = Console(highlight=False)
    console.print(*counts(report), sep="\n", soft_wrap=True)
    names = [f"p{percentile:g}" for percentile in wanted.percentiles]
    table = plain_table("milliseconds", "mean", *names)
    for metric in wanted.metrics:
        cells = [report[f"{name}_{metric}_ms"] for name in ("mean", *names)]
        table.add_row(TITLES[metric], *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    console.print(table)
    worst = report["worst_gap_request"]
    if worst is not None:
        console.print(f"worst gap between news {report['worst_gap_ms']:.1f} ms, in request {worst}")


def counts(report: Mapping[str, Any]) -> Sequence[str]:
    """The lines above the table."""
    ended = "interrupted; " if report["interrupted"] else ""
    lines = [
        f"{ended}{report['completed']} of {report['num_prompts']} requests answered in {report['duration']:.2f} s, "
        f"{report['failed']} failed, {report['unfinished']} unfinished; "
        f"at most {report['max_concurrent_requests']} at once",
        f"tokens in {report['total_input_tokens']}, out {report['total_output_tokens']}; "
        f"requests {report['request_throughput']:.2f}/s, output {report['output_throughput']:.1f} tok/s "
        f"(best second {report['max_output_tokens_per_s']:.0f}), "
        f"in and out {report['total_token_throughput']:.1f} tok/s",
    ]
    if "request_goodput" in report:
        goals = " ".join(f"{metric}:{bound:g}" for metric, bound in report["goodput_goals_ms"].items())
        lines.append(f"goodput at {goals}: {report['request_goodput']:.2f} requests/s "
                     f"({report['good_requests']} of {report['completed']})")  # fmt: skip
    for kind, number in report["errors_by_kind"].items():
        lines.append(f"failed: {number} x {kind}: {report['error_examples'][kind]}")
    if report["answers_without_usage"]:
        lines.append(f"{report['answers_without_usage']} answers had no usage: their news were counted as tokens")
    if report["max_send_delay_ms"] > 50 and report["max_concurrency"] is None:
        lines.append(f"this client was late by up to {report['max_send_delay_ms']:.0f} ms: it is the bottleneck")
    return lines
