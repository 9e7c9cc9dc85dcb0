"""The models that can be planned: a folder, a config.json, or the name of a shipped configuration.

Shipped configurations are the published config.json files, one for each name, in `data/planner/models/` (GPT-3 never
had one: its sizes are those of arXiv 2005.14165, table 2.1). Only descriptions are read, never weights. Two are
comparisons that the engine cannot run (`ModelSpec.missing`). An unknown name is refused with near ones.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from coterie.spec.errors import SpecError
from coterie.spec.model import DenseSpec, ModelSpec, MoESpec

ALIASES = {"v3": "DeepSeek-V3", "r1": "DeepSeek-R1", "v2": "DeepSeek-V2", "v2-lite": "DeepSeek-V2-Lite"}
"""Short names; any unambiguous end or beginning of a name counts as well."""


@cache
def model_names() -> tuple[str, ...]:
    """Names of the shipped configurations."""
    folder = files("coterie") / "data" / "planner" / "models"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def model(name_or_path: str) -> tuple[str, ModelSpec]:
    """(name, description) of a folder, a config.json or a shipped name. Raises SpecError with near names, or with the
    field that is missing or unknown."""
    if not name_or_path.strip():
        raise SpecError(f"a model needs a name or a path; {_near(name_or_path)}")
    path = Path(name_or_path)
    named = shipped_name(name_or_path)
    if named is not None and not path.exists():
        return named, _shipped(named)
    if path.exists() or "/" in name_or_path or name_or_path.endswith(".json"):
        spec = ModelSpec.from_hf(path, planned=True)
        folder = path.resolve()
        return (folder.parent.name if folder.name == "config.json" else folder.stem), spec
    raise SpecError(f"there is no model {name_or_path!r}: no such folder, and {_near(name_or_path)}")


def dense_twin(model: ModelSpec) -> ModelSpec:
    """The same model with every routed layer one dense feed-forward of the same size: what the experts cost if all of
    them ran. Equal in size but for the routers, not in quality. Raises SpecError for a model without experts."""
    if not any(model.moe_layers()):
        raise SpecError(f"{model.model_type} has no routed experts, so it is its own dense twin")
    layers = []
    for layer in model.layers:
        ffn = layer.ffn
        if isinstance(ffn, MoESpec):
            width = ffn.num_experts * ffn.intermediate_size + ffn.shared_intermediate_size
            layer = replace(layer, ffn=DenseSpec(width))
        layers.append(layer)
    missing = model.missing or "such a model: it is a comparison"
    return replace(model, layers=tuple(layers), mtp_layers=(), missing=missing)


def shipped_name(name: str) -> str | None:
    """The shipped configuration that a name means: equal but for case and punctuation, or the only one that ends or
    begins with it. An owner before a slash (`deepseek-ai/DeepSeek-V3`) is left out."""
    wanted = _plain(name.rpartition("/")[2])
    known = {_plain(each): each for each in model_names()}
    if wanted in known:
        return known[wanted]
    short = ALIASES.get(name.lower())
    if short in known.values():
        return short
    partial = [each for plain, each in known.items() if len(wanted) > 3 and plain.startswith(wanted)]
    return partial[0] if len(partial) == 1 else None


@cache
def _shipped(name: str) -> ModelSpec:
    source = files("coterie") / "data" / "planner" / "models" / f"{name}.json"
    return ModelSpec.from_hf(Path(str(source)), planned=True)


def _near(name: str) -> str:
    names = {_plain(each): each for each in model_names()}
    wanted = _plain(name)
    near = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    near += [plain for plain in names if plain not in near and len(wanted) > 1 and wanted in plain]
    if near:
        return f"near names of shipped configurations are {', '.join(names[each] for each in near)}"
    return f"the shipped configurations are {', '.join(model_names())}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
