"""Load a checkpoint (or random weights) into a backend: check everything at the door, then stream tensor by tensor.

Peak memory is about the weights themselves: one read buffer, one piece in float32 at a time, whole tensors only where a
bank is filled with their transpose. `load_plan` decides what is read, `safetensors_io` reads, `decode` decodes,
`banks` places. Names of banks and vectors are those of `names.weight_layout`.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coterie.kernels.api import Kernels
from coterie.model.banks import BankFiller, RoleNeed, Rows, memory_needs, must_be_whole
from coterie.model.checkpoint import open_checkpoint
from coterie.model.decode import Decoder
from coterie.model.dummy import dummy_weights
from coterie.model.formats.codes import holds
from coterie.model.load_options import AS_STORED, LoadOptions
from coterie.model.load_plan import LoadPlan, PlannedTensor, Skipped, check_strict, make_plan
from coterie.model.load_report import Conversion, LoadProgress, LoadReport
from coterie.model.packed_manifest import is_packed_folder
from coterie.model.packed_reader import PackedReader
from coterie.model.safetensors_io import LoadError, Piece, RawBytes, ReadStats, StoredTensor, split_rows, stream
from coterie.model.shard import takes
from coterie.spec.cache import CacheKind
from coterie.spec.model import Fp8BlockQuant, ModelSpec
from coterie.spec.weights import BF16, F32, WeightFormat

__all__ = ["LoadError", "LoadOptions", "LoadProgress", "LoadReport", "LoadedWeights", "load_weights"]

ProgressCallback = Callable[[LoadProgress], None]

Admission = Callable[[tuple[RoleNeed, ...]], None]
"""Told what the weights need before anything is allocated; may raise."""

SAMPLED_PIECES = 32
"""One in so many rounded pieces is compared with what was kept of it."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Backend banks and vectors by the keys of `names.weight_layout`; `kind` is f32 only if every bank is."""

    weights: dict[str, Any]
    kind: CacheKind
    report: LoadReport
    needs: tuple[RoleNeed, ...] = ()


def load_weights(
    path: Path | str | None,
    spec: ModelSpec,
    kernels: Kernels,
    options: LoadOptions = AS_STORED,
    *,
    admit: Admission = lambda needs: None,
    progress: ProgressCallback | None = None,
) -> LoadedWeights:
    """Load the weights of `spec` from a folder or file, or make random ones.

    `admit` sees what the weights need and may refuse. Raises `LoadError` with all problems before anything is
    allocated.
    """
    if options.load_format == "dummy":
        return _load_dummy(spec, kernels, options, admit, progress)
    shard = options.shard
    if path is None:
        raise LoadError("no weights were given: pass a model folder, or load_format 'dummy' for random weights")
    if is_packed_folder(Path(path)):
        packed = PackedReader(Path(path), spec, options.quant, options.dtype, shard)
        admit(packed.needs)
        weights, report = packed.load(kernels, progress)
        return LoadedWeights(weights, packed.manifest.kind, report, packed.needs)
    checkpoint = open_checkpoint(Path(path))
    plan = make_plan(checkpoint, spec, options.dtype, mtp=options.mtp, quant=options.quant)
    if options.strict:
        check_strict(plan)
    needs = memory_needs(plan.layout if shard is None else shard.needed(plan.layout), plan.bank_formats)
    if shard is not None:
        plan = shard.plan(plan)
    admit(needs)
    load = TensorLoad(plan, spec, kernels, progress, held=None if shard is None else shard.held)
    load.run()
    doubts = load.compare_copies()
    if options.strict and doubts:
        raise LoadError("strict loading refuses:\n" + "\n".join(f"  - {doubt}" for doubt in doubts), tuple(doubts))
    report = LoadReport(
        files=tuple(file.name for file in checkpoint.files),
        tensors=load.tensors_read,
        nbytes=load.stats.bytes,
        seconds=load.seconds,
        read_seconds=load.stats.seconds,
        conversions=load.conversions(),
        skipped=(*plan.skipped, *load.skipped),
        notes=(*plan.notes, *plan.doubts, *doubts, *load.notes),
        mtp_present=plan.mtp_present,
    )
    return LoadedWeights(load.filler.weights, plan.kind, report, needs)


def _load_dummy(
    spec: ModelSpec, kernels: Kernels, options: LoadOptions, admit: Admission, progress: ProgressCallback | None
) -> LoadedWeights:
    began = time.perf_counter()
    clock = _Clock(progress)
    made = dummy_weights(spec, kernels, options, admit=admit, on_progress=clock.tick)
    clock.tick(made.nbytes, made.nbytes, "")
    report = LoadReport(
        files=(),
        tensors=made.tensors,
        nbytes=made.nbytes,
        seconds=time.perf_counter() - began,
        read_seconds=0.0,
        conversions=(),
        skipped=(),
        notes=(f"random weights from seed {options.seed}: the model's output has no meaning",),
        mtp_present=options.mtp and bool(spec.mtp_layers),
    )
    return LoadedWeights(made.weights, made.kind, report, made.needs)


class _Clock:
    """Turns byte counts into `LoadProgress`."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self.callback = callback
        self.began = time.perf_counter()

    def tick(self, done: int, total: int, tensor: str) -> None:
        if self.callback is None:
            return
        rate = done / max(time.perf_counter() - self.began, 1e-9)
        eta = (total - done) / rate if rate > 0 else 0.0
        self.callback(LoadProgress(done, total, rate, eta, tensor))


def _add(sums: dict[Any, tuple[float, float]], key: Any, more: tuple[float, float]) -> None:
    error, total = sums.get(key, (0.0, 0.0))
    sums[key] = (error + more[0], total + more[1])


class _Conversion(NamedTuple):
    """How a tensor is stored, the label of the format it is held in, whether that loses nothing."""

    stored: str
    held: str
    exact: bool


class TensorLoad:
    """One run through the planned tensors.

    `losses`: by (bank, matrix), sums of squares of what rounding lost and of the values, of one in `sampled` pieces.
    `held`: banks that exist already.
    """

    def __init__(
        self,
        plan: LoadPlan,
        spec: ModelSpec,
        kernels: Kernels,
        progress: ProgressCallback | None,
        sampled: int = SAMPLED_PIECES,
        held: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan, self.sampled = plan, sampled
        self.losses: dict[tuple[str, int], tuple[float, float]] = {}
        block = spec.quantization
        block = block if isinstance(block, Fp8BlockQuant) else Fp8BlockQuant()
        self.decoder = Decoder(block, keep_fp8=any(form.kind == "fp8" for form in plan.bank_formats.values()))
        self.filler = BankFiller(kernels, plan.layout, plan.bank_formats, held)
        self.stats = ReadStats()
        self.clock = _Clock(progress)
        self.seconds = 0.0
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self._conversions: Counter[_Conversion] = Counter()
        self._pieces_of: Counter[_Conversion] = Counter()
        self._errors: dict[_Conversion, tuple[float, float]] = {}
        self._by_name = {item.tensor.name: item for item in plan.tensors}
        compared = {name for pair in plan.comparisons for name in (pair.copy, pair.original)}
        self._digests = {name: hashlib.blake2b() for name in compared}
        self._sides = {side.name: (side, item) for item in plan.tensors for side in item.sides}
        self.tensors_read = len(self._by_name) + len(self._sides)

    def run(self) -> None:
        """Read and place everything."""
        began = time.perf_counter()
        pieces = list(self._pieces(self._reading_order()))
        total = sum(piece.nbytes for piece in pieces)
        done = 0
        for piece, raw in stream(pieces, self.stats):
            self._take(piece, raw)
            done += piece.nbytes
            self.clock.tick(done, total, piece.tensor.name)
        self.seconds = time.perf_counter() - began

    def _reading_order(self) -> list[StoredTensor]:
        """File by file in the order of the bytes; before a file's weights, the tables that lie behind them."""
        files = list(dict.fromkeys(item.tensor.path for item in self.plan.tensors))
        files += [side.path for side, _ in self._sides.values() if side.path not in files]
        number = {path: index for index, path in enumerate(files)}

        def position(tensor: StoredTensor) -> tuple[int, int]:
            return number[tensor.path], tensor.start

        late: dict[Path, list[StoredTensor]] = {path: [] for path in files}
        main: dict[Path, list[StoredTensor]] = {path: [] for path in files}
        for item in self.plan.tensors:
            main[item.tensor.path].append(item.tensor)
        for side, item in self._sides.values():
            behind = position(side) > position(item.tensor)
            (late[item.tensor.path] if behind else main[side.path]).append(side)
        behind_count = sum(map(len, late.values()))
        if behind_count:
            self.notes.append(f"{behind_count} scale tables lie behind their weights and were read first")
        return [tensor for path in files for part in (late, main) for tensor in sorted(part[path], key=position)]

    def _pieces(self, tensors: list[StoredTensor]) -> Iterator[Piece]:
        for tensor in tensors:
            item = self._by_name.get(tensor.name)
            packed = None if item is None else item.packed
            whole = item is None or must_be_whole(item.entry) or (packed is not None and packed.must_be_whole)
            pieces = split_rows(tensor, whole=whole)
            yield from pieces if item is None else (piece for piece in pieces if takes(item.entry, piece))

    def _take(self, piece: Piece, raw: RawBytes) -> None:
        name = piece.tensor.name
        if name in self._digests:
            self._digests[name].update(raw.data)
        item = self._by_name.get(name)
        if item is None:
            side, owner = self._sides[name]
            keep = self.decoder.keep_scale if owner.scale is not None else self.decoder.keep_side
            keep(side, raw)
        elif item.entry.parts:
            rows = self.decoder.rows(item, piece, raw)
            self.filler.put(item.entry, piece.row, rows)
            self._count(item, piece, rows)
            if piece.is_last:
                self.decoder.drop(item)

    def _count(self, item: PlannedTensor, piece: Piece, values: Rows) -> None:
        """Book what the tensor became, and measure the loss of some pieces that were rounded."""
        formats = self.plan.bank_formats
        for held in dict.fromkeys(formats.get(part.bank, F32) for part in item.entry.parts):
            kind = self._conversion(item, held)
            if piece.is_last:
                self._conversions[kind] += 1
            if kind.exact:
                continue
            if self._pieces_of[kind] % self.sampled == 0:
                for part in item.entry.parts:
                    if formats.get(part.bank) == held:
                        found = self.filler.error(part, piece.row, values)
                        _add(self._errors, kind, found)
                        _add(self.losses, (part.bank, part.index), found)
            self._pieces_of[kind] += 1

    def _conversion(self, item: PlannedTensor, held: WeightFormat) -> _Conversion:
        stored, label = item.tensor.dtype, held.label()
        if item.scale is not None:
            scale = self.decoder.scales[item.scale.name]
            exact = scale.fp8_format == held or (not held.is_scaled and scale.is_power_of_two)
            return _Conversion(f"{stored} x {item.scale.dtype} block scales", label, exact)
        if item.packed is not None:
            stored = f"{item.packed.stored.scheme.layout} {item.packed.stored.scheme.bits} bits"
        if held.is_scaled:
            return _Conversion(stored, label, item.form is not None and holds(held, item.form))
        return _Conversion(stored, label, held == F32 or (held == BF16 and stored == "BF16"))

    def conversions(self) -> tuple[Conversion, ...]:
        """Most frequent first."""
        found = []
        for kind, count in self._conversions.most_common():
            error, total = self._errors.get(kind, (0.0, 0.0))
            loss = (error / total) ** 0.5 if total > 0 else None
            found.append(Conversion(kind.stored, kind.held, kind.exact, count, loss))
        return tuple(found)

    def compare_copies(self) -> list[str]:
        """Settle the plan's comparisons: equal copies are listed as skipped; a differing one is a note, or a doubt."""
        doubts: list[str] = []
        equal: dict[str, list[StoredTensor]] = {}
        for pair in self.plan.comparisons:
            if self._digests[pair.copy].digest() == self._digests[pair.original].digest():
                equal.setdefault(pair.original, []).append(self._by_name[pair.copy].tensor)
                continue
            text = f"{pair.copy} differs from {pair.original}"
            if pair.matters:
                doubts.append(f"{text}, but config.json ties them: it was ignored")
            else:
                self.notes.append(f"{text}; the model's own was used, so MTP may be accepted less often")
        for original, copies in equal.items():
            size = sum(copy.nbytes for copy in copies)
            self.skipped.append(Skipped(f"equal copy of {original}", len(copies), size, copies[0].name))
        return doubts
