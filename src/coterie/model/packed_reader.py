"""Load a packed folder: units are read from disk straight into the memory of the banks and checked on the way.

Nothing is converted on the native backend; another one gets the dequantised values. A unit that differs from its
checksum is refused by the name of its bank and its expert. `packed_manifest` has checked everything else before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from coterie.kernels import _native
from coterie.kernels.api import Kernels
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.model.banks import RoleNeed, memory_needs
from coterie.model.load_report import LoadProgress, LoadReport
from coterie.model.packed_manifest import (
    VECTORS_NAME,
    Manifest,
    PackedGroup,
    check_manifest,
    check_quant,
    read_manifest,
)
from coterie.model.safetensors_io import LoadError
from coterie.spec.model import ModelSpec
from coterie.spec.weights import BF16, F32, QuantPlan

CACHED = 0.5
"""From this share of the files on, what the page cache holds is worth going through it."""


class Way(NamedTuple):
    """How to read; `reason` is a line of the report."""

    direct: bool
    reason: str


def choose_way(folder: Path, manifest: Manifest, available: int) -> Way:
    """Through the page cache if it holds the files, or can keep them beside the weights for the next start; else past
    it, which is faster than filling it and pushes nothing out."""
    sizes = dict(manifest.files)
    total = max(1, sum(sizes.values()))
    held = sum(size * _native.cached_fraction(str(folder / name)) for name, size in sizes.items()) / total
    if held >= CACHED:
        return Way(False, f"read through the page cache, which held {100 * held:.0f} % of the files")
    if 2 * total <= available:
        return Way(False, "read through the page cache, so that the next start finds the files there")
    return Way(True, "read past the page cache, which could not keep the files beside the weights")


class PackedReader:
    """One packed folder, checked against a model. `load` may be called once for each backend."""

    def __init__(self, folder: Path, spec: ModelSpec, quant: QuantPlan, dtype: str) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        layout = check_manifest(self.manifest, folder, spec)
        check_quant(self.manifest, quant, dtype, layout)
        formats = {key: matrix.spec.format for key, matrix in self.manifest.matrices().items()}
        self.needs: tuple[RoleNeed, ...] = memory_needs(layout, formats)

    def load(
        self, kernels: Kernels, progress: Callable[[LoadProgress], None] | None
    ) -> tuple[dict[str, Any], LoadReport]:
        """Banks and vectors by key, and the report."""
        began = time.perf_counter()
        weights: dict[str, Any] = {}
        how = choose_way(self.folder, self.manifest, int(psutil.virtual_memory().available))
        done, total = 0, self.manifest.nbytes
        for group in self.manifest.groups:
            weights.update(self._group(group, kernels, direct=how.direct))
            done += group.nbytes
            if progress is not None:
                rate = done / max(time.perf_counter() - began, 1e-9)
                progress(LoadProgress(done, total, rate, (total - done) / rate, group.name))
        weights.update(self._vectors(kernels))
        seconds = time.perf_counter() - began
        units = sum(group.count for group in self.manifest.groups)
        checked = f"packed from {self.manifest.source}; CRC-32C of {units} units checked"
        notes = (checked, how.reason, *self.manifest.notes)
        report = LoadReport(
            files=(*(name for name, _ in self.manifest.files), VECTORS_NAME),
            tensors=len(weights),
            nbytes=total,
            seconds=seconds,
            read_seconds=seconds if isinstance(kernels, NativeKernels) else 0.0,
            conversions=(),
            skipped=(),
            notes=notes,
            mtp_present=self.manifest.mtp,
        )
        return weights, report

    def _group(self, group: PackedGroup, kernels: Kernels, *, direct: bool) -> dict[str, Any]:
        keys = [matrix.key for matrix in group.matrices]
        specs = [matrix.spec for matrix in group.matrices]
        if isinstance(kernels, NativeKernels):
            banks = kernels.allocate(group.count, *specs)
            read_units(kernels, banks[0], self.folder / group.file, group, direct=direct)
            return dict(zip(keys, banks, strict=True))
        native = NativeKernels(machine().threads)
        held = native.allocate(group.count, *specs)
        read_units(native, held[0], self.folder / group.file, group, direct=direct)
        wide = [replace(spec, format=spec.format if spec.format == BF16 else F32) for spec in specs]
        banks = kernels.allocate(group.count, *wide)
        for source, target in zip(held, banks, strict=True):
            for index in range(group.count):
                kernels.fill(target, index, 0, native.read(source, index))
        return dict(zip(keys, banks, strict=True))

    def _vectors(self, kernels: Kernels) -> dict[str, Any]:
        vectors = self.manifest.vectors
        raw = np.fromfile(self.folder / VECTORS_NAME, np.uint8)
        if raw.nbytes != vectors.nbytes or f"{_native.crc32c(raw):08x}" != vectors.crc32c:
            raise LoadError(f"{self.folder / VECTORS_NAME} is damaged: its checksum differs; copy the folder again")
        found, at = {}, 0
        values = raw.view("<f4")
        for key, size in vectors.sizes:
            found[key] = kernels.vector(values[at : at + size])
            at += size
        return found


def read_units(kernels: NativeKernels, bank: Any, path: Path, group: PackedGroup, *, direct: bool) -> None:
    """Read and check the units of a group into the memory that `bank` shares. `LoadError` names the first bad unit."""
    unit, code, differs = kernels.read_units(bank, path, group.offset, group.checksums(), direct=direct)
    if unit < 0:
        return
    at = group.offset + unit * group.unit_bytes
    where = f"{group.name}[{unit}] ({path.name}, {group.unit_bytes} bytes from {at})"
    if differs:
        raise LoadError(f"{where} is damaged: its bytes differ from the checksum; copy the folder again")
    reason = os.strerror(code) if code else "the file ended early: it changed while being read"
    raise LoadError(f"cannot read {where}: {reason}")
