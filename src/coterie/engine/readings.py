"""Readings: what this machine's memory, multipliers, disk and our kernels do, for a hardware file (`plan calibrate`).

Every reading of a kernel comes with the rates of the same moment, so that a slow phase of the host leaves their ratio
alone. Shapes are a grid (small and large matrices, from cache and from memory, few and many rows), no model's own.
Not here: what planning makes of them (`planner/measured.py`), the engine's own constants (`engine/small_steps.py`).
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from coterie.engine.limits import array_bytes
from coterie.engine.memory import available_memory
from coterie.kernels import _native
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.cgroup import group_folders, read_text
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.spec.errors import CoterieError
from coterie.spec.model import AttentionSpec, RopeSpec
from coterie.spec.weights import BF16, FP8, INT4_TABLE, MatrixSpec, WeightFormat

FORMS = {
    "bf16": BF16,
    "fp8": FP8,
    "int8": WeightFormat("int8", 32, "f16"),
    "int4": WeightFormat("code4", 32, "f16", INT4_TABLE),
}
SHAPES = ((128, 32), (256, 64), (2048, 1024))
"""(hidden, inner) of an expert; the first from cache only."""
SETS = (8 << 20, 384 << 20)
"""Bytes of all experts together: what fits in a cache, what does not."""
ROWS = (1, 2, 4, 8, 16, 64, 256)
MOST_OPERATIONS = 4e9
READ_SETS = (8 << 20, 32 << 20, 128 << 20, 384 << 20)
PAGE = 64
DISK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A kernel's fastest of a few calls. unit: values of one matrix, or the attention's key width. set_bytes: memory it
    goes round in; rows: that share a matrix, or of one sequence. read, peak: bytes and operations a second of the same
    moment."""

    form: str
    unit: float
    set_bytes: float
    rows: float
    seconds: float
    nbytes: float
    operations: float
    read: float
    peak: float


class Reader:
    """Takes readings with as many threads as the engine would use."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or machine().threads
        self.kernels = NativeKernels(self.threads)
        self._device = _native.Device(self.threads, "generic")
        self._array = array_bytes()

    def read_rate(self, nbytes: float | None = None) -> float:
        """Bytes a second from an array of so many bytes (None: one beyond every cache), huge pages where there are."""
        return max(self._device.probe("read", int(self.set_bytes(nbytes)), 3))

    def set_bytes(self, nbytes: float | None) -> float:
        """Bytes of the array that `read_rate` reads."""
        return float(max(nbytes or self._array, READ_SETS[0]))

    def peak(self, form: str) -> float:
        """Operations a second of the unit of the kernels' level: for wide forms and attention, or for integers."""
        wide = form in ("bf16", "fp8")
        tile = "amx_bf16" if wide else "amx_int8"
        use_tile = self.kernels.isa == "amx" and tile in _native.probe_kinds()
        return max(self._device.probe(tile if use_tile else "f32" if wide else "int8", READ_SETS[0], 5))

    def products(self, form: str) -> Iterator[Reading]:
        """Readings of the experts' product over the grid."""
        for hidden, inner in SHAPES:
            for most in SETS[:1] if (hidden, inner) == SHAPES[0] else SETS:
                yield from self._bank(form, hidden, inner, min(most, available_memory() // 8))

    def _bank(self, form: str, hidden: int, inner: int, most: int) -> Iterator[Reading]:
        format = FORMS[form]
        up, down = MatrixSpec(2 * inner, hidden, format, 2), MatrixSpec(hidden, inner, format)
        unit = up.nbytes + down.nbytes
        count = max(1, round(most / unit))
        banks = self.kernels.allocate(count, up, down)
        values = np.random.default_rng(0).standard_normal((2 * inner, hidden), np.float32)
        self.kernels.fill(banks[0], 0, 0, values)
        self.kernels.fill(banks[1], 0, 0, np.ascontiguousarray(np.resize(values, (hidden, inner))))
        units = self.kernels.units(banks[0])
        for number in range(1, count):
            units[number] = units[0]
        read, peak = self.read_rate(count * unit), self.peak(form)
        for rows in ROWS:
            used = max(1, min(count, int(MOST_OPERATIONS / (6 * hidden * inner * rows))))
            counts = np.zeros(count, np.int64)
            counts[:used] = rows
            x = np.resize(values, (used * rows, hidden))
            seconds = fastest(partial(self.kernels.experts, x, counts, *banks))
            yield Reading(
                form=form, unit=3 * hidden * inner, set_bytes=count * unit, rows=rows, seconds=seconds,
                nbytes=used * unit, operations=6 * used * rows * hidden * inner, read=read, peak=peak,
            )  # fmt: skip

    def attention(self) -> Iterator[Reading]:
        """Readings over a bf16 cache: MLA with a narrow and a wide latent, and GQA; streams and prompts."""
        for spec in (_mla(8, 48, 16), _mla(16, 512, 64), _gqa(16, 4, 128)):
            peak, read = self.peak("bf16"), self.read_rate(SETS[0])
            for sequences, context, rows in ((1, 1024, 1), (8, 512, 1), (1, 512, 16), (1, 512, 512)):
                call, nbytes = self._attention(spec, sequences, context, rows)
                pairs = sequences * sum(range(context - rows + 1, context + 1))
                yield Reading(
                    form=spec.kind, unit=_width(spec), set_bytes=nbytes, rows=rows, seconds=fastest(call),
                    nbytes=nbytes, operations=2 * pairs * spec.num_heads * _channels(spec), read=read, peak=peak,
                )  # fmt: skip

    def _attention(
        self, spec: AttentionSpec, sequences: int, context: int, rows: int
    ) -> tuple[Callable[[], object], float]:
        """A call that attends the last rows of each sequence, and the bytes of the cache that it reads."""
        pages = -(-context // PAGE)
        caches = [self.kernels.allocate_cache(sequences * pages * PAGE, each, "bf16") for each in spec.cache_streams]
        whole = self.kernels.prepare(_batch(sequences, context, context))
        for cache, stream in zip(caches, spec.cache_streams, strict=True):
            self.kernels.cache_write(cache, _normal(sequences * context, stream.width), whole, stream)
        query = _normal(sequences * rows, spec.num_heads, _width(spec))
        batch = self.kernels.prepare(_batch(sequences, context, rows))
        values = caches[1] if len(caches) > 1 else None
        nbytes = sequences * context * sum(stream.row_bytes("bf16") for stream in spec.cache_streams)
        return lambda: self.kernels.attend(query, caches[0], values, batch, spec), float(nbytes)


def disk_rate(folder: Path | None = None, nbytes: int = DISK_BYTES) -> float:
    """Bytes a second that a new file gives past the page cache; 0 where the file system does not allow that."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 22, np.uint8)
    buffer = np.zeros((1 << 22) + 4096, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 4096 :][: 1 << 22]
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(nbytes // len(data)):
            file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
        try:
            handle = os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:
            return 0.0
        try:
            begin, total = time.perf_counter(), 0
            while read := os.readv(handle, [buffer.data]):
                total += read
        except OSError:
            return 0.0
        finally:
            os.close(handle)
        return total / (time.perf_counter() - begin) if hasattr(os, "O_DIRECT") else 0.0


def fastest(call: Callable[[], object], seconds: float = 0.015) -> float:
    """The fastest of at least three calls and of as many as fit in that time."""
    best, end, count = float("inf"), time.perf_counter() + seconds, 0
    while count < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best, count = min(best, time.perf_counter() - begin), count + 1
    return best


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may have at most: the machine's memory, or what its control groups grant."""
    names = {2: "memory.max", 1: "memory.limit_in_bytes"}
    texts = [read_text(folder / names[version]) for version, folder in group_folders(root, "memory")]
    limits = [int(text) for text in texts if text is not None and text.isdigit()]
    return min([int(psutil.virtual_memory().total), *limits])


def processor_name(root: Path = Path("/")) -> str:
    """What the system calls the processor."""
    lines = (read_text(root / "proc/cpuinfo") or "").splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, "") or platform.machine()


def check_room() -> None:
    """Raise CoterieError where memory does not suffice for the readings."""
    if available_memory() < 8 * SETS[0]:
        raise CoterieError(f"calibrating needs {8 * SETS[0] >> 20} MiB of free memory; end other programs first")


def _mla(heads: int, rank: int, rope: int) -> AttentionSpec:
    table = RopeSpec(rope, 1e4, interleaved=True)
    nope, value = rank // 4, rank // 4
    return AttentionSpec("mla", heads, heads, nope + rope, value, (nope + rope) ** -0.5, table, nope, rope, None, rank)


def _gqa(heads: int, groups: int, width: int) -> AttentionSpec:
    return AttentionSpec("gqa", heads, groups, width, width, width**-0.5, RopeSpec(width, 1e4, interleaved=False))


def _width(spec: AttentionSpec) -> int:
    """Channels of a query row."""
    return spec.latent_width if spec.kind == "mla" else spec.qk_head_dim


def _channels(spec: AttentionSpec) -> int:
    """Multiply-adds of one pair and head."""
    return spec.latent_width + spec.kv_lora_rank if spec.kind == "mla" else spec.qk_head_dim + spec.v_head_dim


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _batch(sequences: int, context: int, rows: int) -> ForwardBatch:
    """The last rows of sequences whose pages lie in order."""
    pages = -(-context // PAGE)
    positions = np.arange(context - rows, context)
    starts = np.arange(sequences)[:, None] * pages * PAGE
    return ForwardBatch(
        token_ids=np.zeros(sequences * rows, np.int32),
        positions=np.tile(positions, sequences).astype(np.int32),
        query_start=np.arange(sequences + 1, dtype=np.int32) * rows,
        context_lens=np.full(sequences, context, np.int32),
        logit_rows=np.zeros(0, np.int32),
        block_tables=np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages),
        slot_mapping=(starts + positions).reshape(-1).astype(np.int64),
        page_size=PAGE,
    )
