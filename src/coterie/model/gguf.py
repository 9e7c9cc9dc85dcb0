"""A GGUF model as a Hugging Face folder would say it: config, tokenizer and tensors under their usual names.

Puts `gguf_file` (headers), `gguf_config`, `gguf_tokenizer` and `gguf_names` together; all parts of a split file count
as one. Reads no weights, except the few rotary factors that stand for Llama 3's settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.model.gguf_config import ROPE_FACTORS, GgufFacts, config_of
from coterie.model.gguf_file import GgufFile, find_gguf, read_gguf
from coterie.model.gguf_names import canonical_tensors
from coterie.model.gguf_tokenizer import TokenizerFiles, tokenizer_of
from coterie.model.safetensors_io import LoadError, StoredTensor

_LAYER = re.compile(r"model\.layers\.(\d+)\..+|blk\.(\d+)\..+")
_MAX_FACTORS = 4096


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`config`: what `ModelSpec.from_hf` reads. `tensors`: under the names of `model/names.py`."""

    files: tuple[Path, ...]
    config: dict[str, Any]
    tokenizer: TokenizerFiles | None
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...]


def open_gguf(path: Path, *, with_tokenizer: bool = True) -> GgufModel:
    """Read the headers of a GGUF file, of all parts of a split one, or of the one model in a folder.

    `with_tokenizer` false saves the time to rebuild it, for those who want tensors only.
    """
    paths = find_gguf(path)
    if not paths:
        raise LoadError(f"{path} is no GGUF file and holds none")
    parts = [read_gguf(part) for part in paths]
    first, tensors = parts[0], _merge(parts)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    factors = tensors.pop(ROPE_FACTORS, None)
    values = None if factors is None else _read_factors(factors)
    config = config_of(GgufFacts(first.path.name, first.metadata, shapes, values))
    named = canonical_tensors(tensors, first.metadata["general.architecture"], config)
    notes: list[str] = []
    beyond = [name for name in named if _layer_of(name) >= config["num_hidden_layers"]]
    if beyond:
        notes.append(f"{len(beyond)} tensors of prediction layers in a GGUF file are not used")
    for name in beyond:
        del named[name]
    tokenizer = tokenizer_of(first.metadata, first.path.name) if with_tokenizer else None
    return GgufModel(tuple(paths), config, tokenizer, named, tuple(notes))


def _layer_of(name: str) -> int:
    match = _LAYER.fullmatch(name)
    return int(match[1] or match[2]) if match else -1


def _merge(parts: list[GgufFile]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        declared = part.metadata.get("split.count", 1 if len(parts) == 1 else None)
        if len(parts) > 1 and (declared != len(parts) or part.metadata.get("split.no") != number):
            raise LoadError(f"{part.path.name} does not say that it is part {number + 1} of {len(parts)}: mixed files")
        if len(parts) == 1 and declared not in (0, 1):
            raise LoadError(f"{part.path.name} is one part of {declared}: keep the names that end in -0000N-of-0000M")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise LoadError(f"tensor {name!r} is in {tensors[name].path.name} and {part.path.name}: mixed files")
            tensors[name] = tensor
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise LoadError(f"{parts[0].path.name} announces {total} tensors, its parts hold {len(tensors)}: mixed files")
    return tensors


def _read_factors(tensor: StoredTensor) -> NDArray[np.float32]:
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise LoadError(f"{tensor.path.name}: {tensor.name} is no short vector of float32: damaged")
    try:
        with open(tensor.path, "rb") as file:
            file.seek(tensor.start)
            values = np.frombuffer(file.read(tensor.nbytes), "<f4").astype(np.float32)
    except OSError as error:
        raise LoadError(f"cannot read {tensor.path.name}: {error.strerror or error}") from error
    if len(values) != tensor.shape[0] or not np.isfinite(values).all() or values.min() <= 0:
        raise LoadError(f"{tensor.path.name}: {tensor.name} holds values that divide nothing: damaged")
    return values
