"""What the commands of `plan` share: MODEL, the device and how many, the layout, formats, `--json`; read into `Asked`.

A command is decorated with `plan_options` and gets one `Asked` before its own values. Sizes that cannot be are
refused here or by the values themselves (`Layout`, `HardwareSpec`), in one line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import click

from coterie.cli.main import debug_option
from coterie.cli.ranges import FiniteRange
from coterie.planner.devices import device
from coterie.planner.layout import CacheName, Layout, WeightName, Wish, choose, nearest_format
from coterie.planner.measured import Measured
from coterie.planner.measured_file import read_engine
from coterie.planner.memory import DEFAULT_LOAD, MAX_TOKENS, Load
from coterie.planner.models import model as find_model
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec
from coterie.spec.parallel import ExchangeDtype
from coterie.spec.weights import MXFP4_TABLE

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
COUNT = click.IntRange(1, 65536)
TOKENS = click.IntRange(1, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan is about. `name` is the model's, `as_json` whether `--json` was given. measured: our engine's kernels
    where the hardware is a file of `plan calibrate`."""

    name: str
    model: ModelSpec
    hardware: HardwareSpec
    layout: Layout
    as_json: bool
    measured: Measured | None = None

    def question(self, **more: Any) -> dict[str, Any]:
        """What was asked, as JSON repeats it under `asked`: the only plain numbers of an answer."""
        layout = {name: value for name, value in asdict(self.layout).items() if name != "devices"}
        return {"model": self.name, "hardware": self.hardware.name, "devices": self.layout.devices, **layout, **more}

    def title(self) -> str:
        """The same in a line."""
        layout = self.layout
        parts = [f"tp {layout.tp}", f"dp {layout.dp}", f"ep {layout.ep}"]
        parts += [f"{layout.redundant} redundant experts"] if layout.redundant else []
        parts += [f"weights {layout.weights}"]
        parts += [f"attention {layout.attention}"] if layout.attention else []
        parts += [f"cache {layout.kv}"] + (["with MTP"] if layout.mtp else [])
        parts += [f"outputs back as {layout.exchange}"] if layout.exchange and layout.devices > 1 else []
        return f"{self.name} on {layout.devices} x {self.hardware.name}: {', '.join(parts)}"


MODEL_OPTIONS: tuple[Decorator, ...] = (
    click.argument("model"),
    click.option("--hardware", "--hw", "hardware", required=True, metavar="NAME|FILE",
                 help="A device of `plan devices`, or a YAML file of HardwareSpec's fields."),
    click.option("-n", "--devices", "devices", type=COUNT, default=1, show_default=True, help="How many of them."),
    click.option("--memory-gb", type=FiniteRange(1e-3, 1e6),
                 help="Memory of a device in 1e9 bytes, if it is not the table's."),
)  # fmt: skip

LAYOUT_OPTIONS: tuple[Decorator, ...] = (
    click.option("--tp", type=COUNT, help="Ranks that share a request's heads and columns. [default: 1 for MLA, else "
                 "as many as the device's domain and the heads allow]"),
    click.option("--dp", type=COUNT, help="Groups that answer different requests. [default: devices / tp]"),
    click.option("--ep", type=COUNT, help="Ranks over which experts are spread. [default: all devices]"),
    click.option("--redundant", type=click.IntRange(0, 65536),
                 help="Expert slots beyond one for each. [default: the fewest that divide over ep]"),
    click.option("--weights", type=click.Choice(("auto", *get_args(WeightName))), default="auto", show_default=True,
                 help="Format of expert and feed-forward weights; auto is what the checkpoint holds."),
    click.option("--attention", type=click.Choice(("auto", *get_args(WeightName))), default="auto", show_default=True,
                 help="Format of the attention projections; auto is that of --weights."),
    click.option("--kv", type=click.Choice(get_args(CacheName)), default="bf16", show_default=True,
                 help="Format of the cache; fp8-scaled is FlashMLA's with scales and 16-bit rope."),
    click.option("--exchange-dtype", "exchange", type=click.Choice(get_args(ExchangeDtype)),
                 help="On CPUs, as `coterie serve` has it: in which experts' outputs come back. [default: float32]"),
    click.option("--mtp", is_flag=True, help="Load the multi-token-prediction block."),
    click.option("--json", "as_json", is_flag=True, help="Print every number with interval, unit, kind and formula."),
    debug_option,
)  # fmt: skip

LOAD_OPTIONS: tuple[Decorator, ...] = (
    click.option("--batch", type=TOKENS, help="Requests running in the whole system. [default: as many as fit]"),
    click.option("--isl", type=click.IntRange(0, MAX_TOKENS), default=DEFAULT_LOAD.isl, show_default=True,
                 help="Prompt, in tokens."),
    click.option("--osl", type=TOKENS, default=DEFAULT_LOAD.osl, show_default=True, help="Answer, in tokens."),
    click.option("--chunk", type=TOKENS, default=DEFAULT_LOAD.chunk, show_default=True,
                 help="Prompt tokens of one step of a rank."),
    click.option("--utilisation", type=FiniteRange(0.01, 1), default=DEFAULT_LOAD.utilisation,
                 show_default=True, help="Share of a device's memory that may be used."),
    click.option("--page", type=TOKENS, default=DEFAULT_LOAD.page, show_default=True, help="Tokens of a cache page."),
)  # fmt: skip


def plan_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, which is called with an `Asked` and its own values."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(*[ask(values)], **values)

    wrapped: Callable[..., None] = command
    for option in reversed(MODEL_OPTIONS + LAYOUT_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def load_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a `Load` to a command, which gets it as `load`."""

    @functools.wraps(function)
    def command(*arguments: Any, **values: Any) -> None:
        given = {field.name: values.pop(field.name) for field in fields(Load)}
        function(*arguments, load=Load(**given), **values)

    wrapped: Callable[..., None] = command
    for option in reversed(LOAD_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


@dataclass(frozen=True, slots=True)
class Stored:
    """Formats that weight files hold where the description does not say it; None: it does (or of attention: the
    same)."""

    weights: WeightName | None = None
    attention: WeightName | None = None

    def of(self, wish: Wish) -> Wish:
        """A wish with the files' formats where it says none."""
        if wish.weights is not None or self.weights is None:
            return wish
        return replace(wish, weights=self.weights, attention=wish.attention or self.attention)


def read_model(text: str) -> tuple[str, ModelSpec, Stored]:
    """(name, description, what the files hold) of a MODEL. Raises SpecError."""
    path = Path(text)
    if not text.strip() or (path.suffix != ".gguf" and (not path.is_dir() or (path / "config.json").exists())):
        found = find_model(text)
        return *found, _packed(path) if (path / "coterie.json").is_file() else Stored()
    if path.is_dir() and not any(path.glob("*.gguf")):
        raise SpecError(f"{path} is not a model folder: it has no config.json and no GGUF file")
    return _gguf(path)


def _gguf(path: Path) -> tuple[str, ModelSpec, Stored]:
    """The same of a GGUF file: its format is the one of nearest size, its headers' sizes added up."""
    from coterie.model.gguf import open_gguf

    found = open_gguf(path, with_tokenizer=False)
    matrices = [tensor for name, tensor in found.tensors.items() if ".mlp." in name or ".block_sparse_moe." in name]
    values = sum(math.prod(tensor.shape) for tensor in matrices)
    nbytes = sum(tensor.nbytes for tensor in matrices)
    spec = ModelSpec.from_hf(found.config)
    return found.files[0].stem, spec, Stored(nearest_format(nbytes / values) if values else None)


def _packed(folder: Path) -> Stored:
    """What a folder of `coterie quantize` holds: of feed-forwards and of attention the format of most bytes."""
    from coterie.model.packed_manifest import read_manifest

    sizes: dict[tuple[str, WeightName], int] = {}
    for group in read_manifest(folder).groups:
        for matrix in group.matrices:
            part = "attention" if ".attention." in matrix.key else "ffn" if ".ffn" in matrix.key else ""
            form = matrix.spec.format
            four: WeightName = "fp4" if form.table == MXFP4_TABLE else "int4"
            name = _KINDS.get(form.kind, four)
            if not matrix.key.endswith(".gate"):  # a router, which is never quantised
                sizes[part, name] = sizes.get((part, name), 0) + matrix.spec.nbytes * group.count
    found: dict[str, WeightName] = {}
    for part, name in sorted(sizes, key=lambda key: sizes[key]):  # the last one of a part has most bytes
        found[part] = name
    feed, attention = found.get("ffn"), found.get("attention")
    return Stored(feed, None if attention == feed else attention)


_KINDS: Mapping[str, WeightName] = {
    "f32": "bf16", "bf16": "bf16", "fp8": "fp8", "int8": "int8", "affine8": "int8",
}  # fmt: skip
"""Kinds of weights in memory as formats of a plan; the others have 4 bits."""


def ask(values: dict[str, Any]) -> Asked:
    """Take the shared values out of a command's and resolve them. Raises SpecError."""
    name, model, stored = read_model(values.pop("model"))
    hardware_name = values.pop("hardware")
    hardware, measured = device(hardware_name), read_engine(hardware_name)
    memory = values.pop("memory_gb")
    if memory is not None:
        hardware = replace(hardware, memory_gb=memory)
    wish = stored.of(Wish(**{key: _given(values.pop(key)) for key in _WISHES}))
    layout = choose(model, hardware, values.pop("devices"), wish)
    return Asked(name, model, hardware, layout, values.pop("as_json"), measured)


_WISHES = ("tp", "dp", "ep", "redundant", "weights", "attention", "kv", "mtp", "exchange")


def _given(value: Any) -> Any:
    """None for auto."""
    return None if value == "auto" else value
