"""Write loaded weights as a Hugging Face checkpoint: the name table run backwards, one tensor in memory at a time.

`config.json` and the tokenizer are the caller's to write beside it. Matrices are written in the asked type. Vectors
and the router are narrowed only where that is exact, the correction bias never: load -> export -> load loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.api import HostArray, Kernels
from coterie.model.checkpoint import INDEX_NAME, SINGLE_NAME
from coterie.model.dequant import fits_bfloat16, to_bfloat16
from coterie.model.names import TensorEntry, WeightLayout, weight_layout
from coterie.model.safetensors_io import NewTensor, write_file
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """`dtype` of matrices; a new file begins at `max_shard_bytes`; `overwrite` removes old safetensors files."""

    dtype: Literal["float32", "bfloat16"]
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Files written, tensors in them, bytes on disk."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export_weights(
    weights: Mapping[str, Any],
    spec: ModelSpec,
    kernels: Kernels,
    folder: Path,
    options: ExportOptions,
) -> ExportReport:
    """Write `model.safetensors`, or shards and an index if it would be over the limit; MTP blocks if present.

    Raises `CoterieError` for incomplete weights, and for a folder that already holds safetensors files: a left-over
    index would decide what is loaded later.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    if old and not options.overwrite:
        raise CoterieError(f"{folder} already holds {old[0].name}: choose an empty folder or ask to overwrite")
    layout = weight_layout(spec, mtp=any(key.startswith("mtp.") for key in weights))
    absent = [key for key in (*layout.banks, *layout.vectors) if key not in weights]
    if absent:
        raise CoterieError(f"cannot export: {len(absent)} weights are absent, first {absent[0]!r}")
    gather = _Gather(weights, layout, kernels, options.dtype)
    shards = _shards([gather.tensor(name, entry) for name, entry in layout.tensors.items()], options.max_shard_bytes)
    for file in old:
        file.unlink()
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    written = 0
    for name, shard in zip(names, shards, strict=True):
        written += write_file(folder / name, shard, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return ExportReport(tuple(names), len(layout.tensors), written)


def _shards(tensors: list[NewTensor], limit: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


class _Gather:
    """Puts checkpoint tensors together from banks. The last matrix read is kept: gate and up share one."""

    def __init__(
        self, weights: Mapping[str, Any], layout: WeightLayout, kernels: Kernels, dtype: Literal["float32", "bfloat16"]
    ) -> None:
        self.weights, self.layout, self.kernels, self.dtype = weights, layout, kernels, dtype
        self._last: tuple[str, int, HostArray] | None = None

    def tensor(self, name: str, entry: TensorEntry) -> NewTensor:
        """The tensor with its stored type decided; the values are gathered when they are written."""
        narrow = self._is_narrow(name, entry)

        def data() -> NDArray[Any]:
            values = self._values(entry)
            return to_bfloat16(values) if narrow else values

        return NewTensor(name, "BF16" if narrow else "F32", entry.shape, data)

    def _is_narrow(self, name: str, entry: TensorEntry) -> bool:
        if self.dtype == "float32" or name.endswith("e_score_correction_bias"):
            return False
        bank = entry.parts[0].bank
        keep = bank in self.layout.vectors or self.layout.banks[bank].role == "router"
        return not keep or fits_bfloat16(self._values(entry))

    def _values(self, entry: TensorEntry) -> HostArray:
        first = entry.parts[0]
        if first.bank in self.layout.vectors:
            return np.asarray(self.kernels.to_host(self.weights[first.bank]), np.float32)
        out = np.empty((prod(entry.shape[:-1]), entry.shape[-1]), np.float32)
        for part in entry.parts:
            begin, end = part.rows or (0, len(out))
            left, right = part.cols or (0, out.shape[1])
            matrix = self._matrix(part.bank, part.index)
            source = matrix.T if part.transpose else matrix[part.at : part.at + end - begin]
            out[begin:end, left:right] = source
        return out.reshape(entry.shape)

    def _matrix(self, bank: str, index: int) -> HostArray:
        if self._last is None or self._last[:2] != (bank, index):
            self._last = (bank, index, self.kernels.read(self.weights[bank], index))
        return self._last[2]
