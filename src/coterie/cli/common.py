"""What the verbs share: the engine's flags, the model argument, progress while loading, and how speed is said.

The flags mirror `EngineConfig` and its weight formats field by field; defaults and choices are read from it, so that
help and config cannot disagree. Not a place for verbs, except `version`, which has no file of its own.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from types import TracebackType
from typing import Any, get_args, get_type_hints

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from coterie import __version__
from coterie.cli.main import debug_option
from coterie.cli.ranges import FiniteRange
from coterie.engine.config import OPTION_NAMES, EngineConfig
from coterie.engine.config import engine_config as config_of
from coterie.engine.messages import SamplingParams
from coterie.kernels.select import MAX_THREADS
from coterie.model.gguf_file import find_gguf, local_path
from coterie.spec.errors import CoterieError
from coterie.spec.weights import QuantPlan

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

DEFAULTS = EngineConfig()
AT_LEAST_ONE = click.IntRange(min=1)
THREADS = click.IntRange(1, MAX_THREADS)
SHOWN_PACKAGES = ("numpy", "tokenizers", "safetensors", "msgspec", "fastapi", "uvicorn", "torch")


def choice(field_name: str) -> click.Choice[str]:
    """The values that the Literal of a field of EngineConfig or of its weight formats allows."""
    hints = get_type_hints(EngineConfig) | get_type_hints(QuantPlan)
    return click.Choice([str(value) for value in get_args(hints[field_name])])


ENGINE_OPTIONS: tuple[Decorator, ...] = (
    click.option("--backend", type=choice("backend"), default=DEFAULTS.backend, show_default=True,
                 help="native: C++ on numpy arrays. reference: torch, slow, the oracle."),
    click.option("--dtype", type=choice("dtype"), default=DEFAULTS.dtype, show_default=True,
                 help="Weights in memory; auto keeps what the files hold."),
    click.option("--experts", type=choice("experts"), default=DEFAULTS.quant.experts, show_default=True,
                 help="Feed-forward weights in memory, quantised while loading; auto keeps what the files hold."),
    click.option("--attention", type=choice("attention"), default=DEFAULTS.quant.attention, show_default=True,
                 help="Attention projections in memory."),
    click.option("--head", type=choice("head"), default=DEFAULTS.quant.head, show_default=True,
                 help="Output head in memory; a tied one becomes a copy beside the embedding."),
    click.option("--group", type=choice("group"), default=DEFAULTS.quant.group, show_default=True,
                 callback=lambda context, parameter, value: value if value == "auto" else int(value),
                 help="Inputs that share a scale in int8 and int4 weights; auto: 128 in int8, 32 in int4."),
    click.option("--kv-cache-dtype", type=choice("kv_cache_dtype"), default=DEFAULTS.kv_cache_dtype, show_default=True,
                 help="Cache rows. int8: about half of bfloat16; MLA's rope part stays bfloat16."),
    click.option("--exchange-dtype", type=choice("exchange_dtype"), default=DEFAULTS.exchange_dtype, show_default=True,
                 help="Routed experts' outputs before they are summed, on any number of ranks; bfloat16 halves what "
                      "comes back from other ranks."),
    click.option("--load-format", type=choice("load_format"), default=DEFAULTS.load_format, show_default=True,
                 help="dummy: random weights, config.json is enough."),
    click.option("--max-model-len", "--context-length", "--ctx-size", "-c", "max_model_len", type=AT_LEAST_ONE,
                 help="Longest prompt plus answer, in tokens. [default: the model's]"),
    click.option("--max-running-requests", "--max-num-seqs", "max_running_requests", type=AT_LEAST_ONE,
                 default=DEFAULTS.max_running_requests, show_default=True, help="Requests computed together."),
    click.option("--max-queued-requests", type=AT_LEAST_ONE, default=DEFAULTS.max_queued_requests, show_default=True,
                 help="Requests that may wait; more are refused with 429."),
    click.option("--chunked-prefill-size", "--max-num-batched-tokens", "chunked_prefill_size", type=AT_LEAST_ONE,
                 default=DEFAULTS.chunked_prefill_size, show_default=True, help="Tokens computed in one step."),
    click.option("--page-size", type=AT_LEAST_ONE, default=DEFAULTS.page_size, show_default=True,
                 help="Tokens in one page of the cache."),
    click.option("--kv-cache-tokens", "--max-total-tokens", "kv_cache_tokens", type=AT_LEAST_ONE,
                 help="Capacity of the cache. [default: from --mem-fraction-static]"),
    click.option("--mem-fraction-static", type=FiniteRange(0.0, 1.0, min_open=True),
                 default=DEFAULTS.mem_fraction_static, show_default=True, help="Share of free memory for the cache."),
    click.option("--enable-prefix-caching/--no-prefix-caching", " /--no-enable-prefix-caching",
                 "enable_prefix_caching", default=DEFAULTS.enable_prefix_caching, show_default=True,
                 help="Keep pages of finished prompts for requests that begin alike."),
    click.option("--threads", "-t", type=AT_LEAST_ONE, help="Threads of the kernels. [default: the cores we may use]"),
    click.option("--isa", type=choice("isa"), default=DEFAULTS.isa, show_default=True,
                 help="Instruction set of the kernels; auto takes the best. Levels may round differently."),
    click.option("--strict", is_flag=True, help="Refuse what would otherwise only be reported."),
    click.option("--trust-remote-code", is_flag=True, hidden=True,
                 help="Accepted for compatibility; code from a model folder is never run."),
    debug_option,
)  # fmt: skip

SAMPLING_OPTIONS: tuple[Decorator, ...] = (
    click.option("--temperature", type=FiniteRange(min=0.0), default=1.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=FiniteRange(0.0, 1.0), default=1.0, show_default=True, help="0: the top token."),
    click.option("--top-k", type=click.IntRange(min=-1), default=-1, show_default=True, help="-1 or 0: off."),
    click.option("--min-p", type=FiniteRange(0.0, 1.0), default=0.0, show_default=True),
    click.option("--repetition-penalty", type=FiniteRange(min=0.0, min_open=True), default=1.0, show_default=True),
    click.option("--seed", "sampling_seed", type=int, help="The same seed gives the same answer."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given more than once."),
)

MODEL_OPTIONS: tuple[Decorator, ...] = (
    click.argument("model", required=False),
    click.option("--model", "--model-path", "-m", "model_option", metavar="MODEL", help="The same as MODEL."),
)


def engine_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add MODEL and every engine flag to a command."""
    for option in reversed(MODEL_OPTIONS + ENGINE_OPTIONS):
        function = option(function)
    return function


def sampling_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the sampling flags to a command."""
    for option in reversed(SAMPLING_OPTIONS):
        function = option(function)
    return function


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build the SamplingParams from a command's values; what a command has no flag for keeps its default."""
    return SamplingParams(
        max_tokens=values["max_tokens"],
        min_tokens=values.get("min_tokens", 0),
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        seed=values["sampling_seed"],
        stop=values["stop"],
        ignore_eos=values.get("ignore_eos", False),
    )


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the EngineConfig from a command's values."""
    return config_of({name: value for name, value in values.items() if name in OPTION_NAMES})


def model_folder(values: Mapping[str, Any]) -> str | None:
    """Return the model folder or GGUF file that was asked for, checked; None means the shipped model."""
    given = {value for value in (values["model"], values["model_option"]) if value is not None}
    if len(given) > 1:
        raise click.UsageError(f"two models were given ({', '.join(sorted(given))}); give one")
    if not given:
        return None
    path = local_path(given.pop())
    if not path.exists():
        raise CoterieError(
            f"there is no model folder {path}; give a folder with config.json and safetensors files, "
            "a GGUF file, or no model at all for the shipped one"
        )
    if find_gguf(path):
        return str(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CoterieError(f"{path} is not a model folder: it has no config.json and no GGUF file")
    if not path.is_dir():
        raise CoterieError(f"{path} is a file; give the folder that holds config.json and the weights, or a .gguf")
    return str(path)


class LoadProgress:
    """Show bytes, rate and time left while a model loads: a bar on a terminal, else a plain line every two seconds.

    Call it with (bytes done, bytes in all). Use as a context manager; may be called from another thread. Its clock
    starts with the first news: what happens before (imports, checks) loads no bytes and would spoil the rate.
    """

    def __init__(self, console: Console, verb: str = "loading") -> None:
        self._console, self._verb = console, verb
        self._started: float | None = None
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(verb, total=None, visible=console.is_terminal)

    def __enter__(self) -> LoadProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if self._started is None:
            self._started = self._last_line = now
        if now - self._last_line >= 2.0:
            self._last_line = now
            line = load_line(done, total, now - self._started, self._verb)
            self._console.print(line, highlight=False, soft_wrap=True)


def load_line(done: int, total: int, seconds: float, verb: str = "loading") -> str:
    """Say progress as plain text: share, sizes, rate, time left."""
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:.0f} s left" if rate > 0 else "time left unknown"
    percent = 100.0 * done / total if total else 100.0
    return f"{verb} {percent:.0f} % ({size(done)} of {size(total)}, {size(rate)}/s, {left})"


def size(num_bytes: float) -> str:
    """Write a number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer's counts and seconds. `first_token`: from sending the prompt to the first token; None if none came."""

    num_prompt_tokens: int
    num_output_tokens: int
    total: float
    first_token: float | None = None

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens per second up to the first token."""
        return self.num_prompt_tokens / self.first_token if self.first_token else None

    @property
    def decode_rate(self) -> float | None:
        """Output tokens per second after the first; None for fewer than two."""
        if self.first_token is None or self.num_output_tokens < 2 or self.total <= self.first_token:
            return None
        return (self.num_output_tokens - 1) / (self.total - self.first_token)

    def line(self) -> str:
        """Say it as `312 tok in · 128 out · TTFT 0.84 s · 11.2 tok/s`."""
        parts = [f"{self.num_prompt_tokens} tok in", f"{self.num_output_tokens} out"]
        if self.first_token is not None:
            parts.append(f"TTFT {self.first_token:.2f} s")
        if self.decode_rate is not None:
            parts.append(f"{self.decode_rate:.1f} tok/s")
        return " · ".join(parts)


def error_console() -> Console:
    """The console for progress and asides: stderr, so that stdout holds results only."""
    return Console(stderr=True, highlight=False)


def plain_table(*headers: str) -> Table:
    """A table that fits a terminal of 80 columns; numbers to the right."""
    table = Table(box=SIMPLE, collapse_padding=True, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table


@click.command()
def version() -> None:
    """Show the versions of Coterie and of what it runs on."""
    click.echo(f"coterie {__version__}")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})")
    for name in SHOWN_PACKAGES:
        try:
            click.echo(f"{name} {package_version(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} not installed")
