"""NativeKernels: the C++ backend on numpy float32 arrays. The default; needs no torch.

This file allocates outputs and hands arrays to the extension `_native`, which checks every shape and index and computes
without the GIL. Weights are packed banks; caches are float32, uint16 holding bf16 bits, or
uint8 rows of int8 codes and their scales. Integers: int32 ids and
positions, int64 orders, positions of rows and counts. An output row depends on its own input row only, bit for bit,
whatever the batch and the number of threads; it may differ between ISA levels. Letters as in `kernels/api.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.kernels import _native
from coterie.kernels.api import (
    BlockInput,
    ExpertBanks,
    GroupedWeights,
    HostArray,
    LatentMaps,
    LatentWeights,
    Prepared,
    Projection,
    Regrouped,
    Routed,
    SortedRows,
)
from coterie.kernels.batch import ForwardBatch
from coterie.spec.cache import CacheKind, CacheStream
from coterie.spec.model import AttentionSpec, MoESpec, RopeSpec
from coterie.spec.rope import cos_sin
from coterie.spec.weights import MatrixSpec

Floats = NDArray[np.float32]
_F32 = np.dtype(np.float32)
Integers = NDArray[Any]
MAX_ROUTE_SHAPES = 64
"""Routing rules kept in the extension's form; a model has one or two."""


class NativeKernels:
    """One device: a thread pool and the kernels of one ISA level. Several threads may call it; they take turns."""

    name = "native"

    def __init__(self, threads: int = 1, isa: str | None = None) -> None:
        """`isa` None: the best level. Raises ValueError for one that this build or processor lacks (see `select`)."""
        self._device = _native.Device(threads, isa or _native.isa_levels()[-1])
        # By identity: hashing a spec takes long. The spec is kept, so that its id stays its own.
        self._route_shapes: dict[int, tuple[MoESpec, _native.RouteShape]] = {}

    @property
    def threads(self) -> int:
        return self._device.threads

    @property
    def isa(self) -> str:
        return self._device.isa

    def progress(self) -> int:
        """A number that changes with each piece of a kernel that is begun: a sign of life inside a long call."""
        return self._device.progress()

    # ---- weights and tables ------------------------------------------------------------------------------------------
    def allocate(self, count: int, *matrices: MatrixSpec) -> tuple[_native.Bank, ...]:
        return tuple(_native.allocate(count, [_matrix(matrix) for matrix in matrices]))

    def fill(self, bank: _native.Bank, index: int, row: int, values: HostArray) -> None:
        self._device.fill(bank, index, row, _floats(values))

    def fill_bf16(self, bank: _native.Bank, index: int, row: int, bits: NDArray[np.uint16]) -> None:
        self._device.fill_bf16(bank, index, row, np.ascontiguousarray(bits, np.uint16))

    def fill_codes(
        self,
        bank: _native.Bank,
        index: int,
        row: int,
        codes: NDArray[np.uint8],
        scales: HostArray,
        mins: HostArray | None,
    ) -> None:
        mins = None if mins is None else _floats(mins)
        self._device.fill_codes(bank, index, row, np.ascontiguousarray(codes, np.uint8), _floats(scales), mins)

    def units(self, bank: _native.Bank) -> NDArray[np.uint8]:
        """The memory of all units that the bank's matrices lie in, [count, bytes], writable: what packed checkpoints
        hold. The array keeps the memory alive."""
        units: NDArray[np.uint8] = bank.units()
        return units

    def read_units(
        self, bank: _native.Bank, path: Path, offset: int, checksums: NDArray[np.uint32], *, direct: bool
    ) -> tuple[int, int, bool]:
        """Read all units of a bank's memory from a file (`direct`: past the page cache) and check their CRC-32C.

        Returns (first bad unit or -1, errno of a failed read or 0, whether it is the checksum that differs).
        """
        unit, code, differs, _ = self._device.read_units(bank, str(path), offset, checksums, direct)
        return unit, code, differs

    def read(self, bank: _native.Bank, index: int) -> HostArray:
        out = np.empty((bank.rows, bank.cols), np.float32)
        self._device.read(bank, index, out)
        return out

    def measure(self, bank: _native.Bank, index: int, row: int, values: HostArray) -> tuple[float, float]:
        return self._device.measure(bank, index, row, _floats(values))

    def vector(self, values: HostArray) -> Floats:
        return np.array(values, np.float32)

    def rope_table(self, rope: RopeSpec, max_positions: int) -> Floats:
        return np.ascontiguousarray(cos_sin(rope, max_positions))

    def allocate_cache(self, num_slots: int, stream: CacheStream, kind: CacheKind) -> NDArray[Any]:
        dtype = np.dtype({"f32": np.float32, "bf16": np.uint16, "int8": np.uint8}[kind])
        return np.zeros((num_slots, stream.row_bytes(kind) // dtype.itemsize), dtype)

    # ---- one step ----------------------------------------------------------------------------------------------------
    def prepare(self, batch: ForwardBatch) -> Prepared:
        positions, starts = _integers(batch.positions, np.int32), _integers(batch.query_start, np.int32)
        tables = None if batch.block_tables is None else _integers(batch.block_tables, np.int32)
        slots = None if batch.slot_mapping is None else _integers(batch.slot_mapping, np.int64)
        return Prepared(
            host=batch,
            token_ids=_integers(batch.token_ids, np.int32),
            positions=positions,
            query_start=starts,
            context_lens=_integers(batch.context_lens, np.int32),
            logit_rows=_integers(batch.logit_rows, np.int32),
            block_tables=tables,
            slot_mapping=slots,
            ones_counts=np.array([batch.num_tokens], np.int64),
            layout=_native.Layout(starts, positions, tables, batch.page_size, slots),
        )

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(array)

    def from_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def embed(self, table: _native.Bank, token_ids: Integers) -> Floats:
        ids = _integers(token_ids, np.int32)
        out = np.empty((len(ids), table.cols), np.float32)
        self._device.embed(table, ids, out)
        return out

    def norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        x = _floats(x)
        out = np.empty_like(x)
        self._device.norm(x, weight, eps, out)
        return out

    def add_norm(self, delta: Floats, residual: Floats, weight: Floats, eps: float) -> tuple[Floats, Floats]:
        delta = _floats(delta)
        out, total = np.empty_like(delta), np.empty_like(delta)
        self._device.add_norm(delta, _floats(residual), weight, eps, out, total)
        return out, total

    def linear(self, x: Floats, weight: _native.Bank, bias: Floats | None = None) -> Floats:
        x = _floats(x)
        out = np.empty((len(x), weight.rows), np.float32)
        self._device.linear(x, weight, bias, out)
        return out

    def head_linear(self, x: Floats, weight: _native.Bank) -> Floats:
        x = _floats(x)
        out = np.empty((len(x), weight.count, weight.rows), np.float32)
        self._device.head_linear(x, weight, out)
        return out

    def mla_inputs(
        self, query: Floats, kv: Floats, maps: LatentMaps, positions: Integers, spec: AttentionSpec
    ) -> tuple[Floats, Floats]:
        query, kv = _floats(query), _floats(kv)
        query_out = np.empty((len(query), spec.num_heads, spec.latent_width), np.float32)
        rows_out = np.empty((len(query), spec.latent_width), np.float32)
        rope = _native.RopeInputs(maps.rope, _integers(positions, np.int32))
        self._device.mla_inputs(query, kv, maps.w_uk, maps.norm, rope, _shape(spec), query_out, rows_out)
        return query_out, rows_out

    def gqa_inputs(
        self,
        query: Floats,
        key: Floats,
        norms: tuple[Floats, Floats] | None,
        table: Floats,
        positions: Integers,
        spec: AttentionSpec,
    ) -> tuple[Floats, Floats]:
        query, key, shape = _floats(query), _floats(key), _shape(spec)
        query_out = np.empty((len(query), spec.num_heads, spec.qk_head_dim), np.float32)
        key_out = np.empty_like(key)
        rope = _native.RopeInputs(table, _integers(positions, np.int32))
        q_norm, k_norm = norms or (None, None)
        self._device.gqa_heads(query, q_norm, rope, shape, query_out)
        self._device.gqa_heads(key, k_norm, rope, shape, key_out)
        return query_out, key_out

    def cache_write(self, cache: NDArray[Any], rows: Floats, batch: Prepared, stream: CacheStream) -> None:
        assert batch.slot_mapping is not None, "cache_write: this batch has no slot_mapping"
        self._device.cache_write(cache, _floats(rows), batch.slot_mapping, stream.heads, stream.exact)

    def attend(
        self, query: Floats, keys: NDArray[Any], values: NDArray[Any] | None, batch: Prepared, spec: AttentionSpec
    ) -> Floats:
        query, shape = _floats(query), _shape(spec)
        width = spec.kv_lora_rank if values is None else spec.v_head_dim
        out = np.empty((len(query), spec.num_heads, width), np.float32)
        self._device.attend(query, keys, values, batch.layout, shape, out)
        return out

    def bind_attention(
        self, weights: LatentWeights | GroupedWeights, spec: AttentionSpec
    ) -> _native.LatentWeights | _native.GroupedWeights:
        def linear(projection: Projection) -> _native.Linear:
            return _native.Linear(projection.weight, projection.bias)

        if isinstance(weights, GroupedWeights):
            q_norm, k_norm = weights.norms or (None, None)
            return _native.GroupedWeights(
                q=linear(weights.q),
                k=linear(weights.k),
                v=linear(weights.v),
                o=linear(weights.o),
                q_norm=q_norm,
                k_norm=k_norm,
                rope=weights.rope,
                shape=_shape(spec),
            )
        return _native.LatentWeights(
            q_a=None if weights.q_a is None else linear(weights.q_a),
            q_norm=weights.q_norm,
            q_b=linear(weights.q_b),
            kv_a=linear(weights.kv_a),
            kv_norm=weights.kv_norm,
            w_uk=weights.w_uk,
            w_uv=weights.w_uv,
            o=linear(weights.o),
            rope=weights.rope,
            shape=_shape(spec),
        )

    def attention_block(
        self,
        bound: _native.LatentWeights | _native.GroupedWeights,
        entry: BlockInput,
        batch: Prepared,
        cache: dict[str, NDArray[Any]],
    ) -> tuple[Floats, Floats]:
        delta = _floats(entry.delta)
        residual = None if entry.residual is None else _floats(entry.residual)
        out = np.empty_like(delta)
        total = None if residual is None else np.empty_like(delta)
        given = _native.Entry(delta, residual, entry.norm, entry.eps, out, total)
        if isinstance(bound, _native.LatentWeights):
            self._device.latent_block(bound, given, batch.layout, cache.get("latent"))
        else:
            self._device.grouped_block(bound, given, batch.layout, cache.get("key"), cache.get("value"))
        return out, delta if total is None else total

    def route(self, x: Floats, gate: _native.Bank, bias: Floats | None, spec: MoESpec) -> Routed:
        x = _floats(x)
        ids = np.empty((len(x), spec.top_k), np.int32)
        weights = np.empty((len(x), spec.top_k), np.float32)
        kept = self._route_shapes.get(id(spec))
        if kept is None:
            if len(self._route_shapes) == MAX_ROUTE_SHAPES:
                self._route_shapes.clear()
            kept = self._route_shapes[id(spec)] = (spec, _route_shape(spec))
        self._device.route(x, gate, bias, kept[1], ids, weights)
        return Routed(ids, weights)

    def sort_by_expert(self, expert_ids: Integers, num_experts: int) -> SortedRows:
        ids = _integers(expert_ids, np.int32)
        token, position = np.empty(ids.size, np.int64), np.empty(ids.shape, np.int64)
        counts = np.empty(num_experts, np.int64)
        _native.sort_by_expert(ids, token, position, counts)
        return SortedRows(token, position, counts)

    def gather(self, x: Floats, order: SortedRows) -> Floats:
        return x[order.token]

    def regroup(self, received: NDArray[np.integer]) -> Regrouped:
        experts = np.tile(np.arange(received.shape[1]), received.shape[0])
        order = np.argsort(np.repeat(experts, received.reshape(-1)), kind="stable")
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return Regrouped(order, inverse, received.sum(0).astype(np.int64))

    def concat(self, parts: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(parts)

    def row_bytes(self, gate_up: _native.Bank) -> int:
        return self._device.row_bytes(gate_up)

    def pack_rows(self, x: Floats, gate_up: _native.Bank, out: NDArray[np.uint8]) -> None:
        self._device.pack_rows(_floats(x), gate_up, out)

    def experts(
        self, rows: NDArray[Any], counts: Integers, gate_up: _native.Bank, down: _native.Bank
    ) -> Floats:
        rows = _rows(rows, np.uint8)
        out = np.empty((len(rows), down.rows), np.float32)
        self._device.experts(rows, _integers(counts, np.int64), gate_up, down, out)
        return out

    def gated(self, x: Floats, gate_up: _native.Bank) -> Floats:
        x = _floats(x)
        out = np.empty((len(x), gate_up.rows // 2), np.float32)
        self._device.gated(x, gate_up, out)
        return out

    def moe(
        self, x: Floats, routed: Routed, experts: ExpertBanks, shared: ExpertBanks | None, *, rounded: bool = False
    ) -> tuple[Floats, Integers]:
        x = _floats(x)
        out = np.empty((len(x), experts.down.rows), np.float32)
        counts = np.empty(experts.gate_up.count, np.int64)
        banks = None if shared is None else _native.SharedExperts(shared.gate_up, shared.down, shared.gate)
        ids, weights = _integers(routed.expert_ids, np.int32), _floats(routed.expert_weights)
        self._device.moe(x, ids, weights, experts.gate_up, experts.down, banks, counts, out, rounded)
        return out, counts

    def narrow(self, rows: Floats, take: NDArray[np.int64], out: NDArray[np.uint16]) -> None:
        self._device.narrow(_floats(rows), _integers(take, np.int64), out)

    def combine(
        self, rows: NDArray[Any], position: Integers, weights: Floats, shared: Floats | None, *, rounded: bool = False
    ) -> Floats:
        rows = _rows(rows, np.uint16)
        out = np.empty((len(position), rows.shape[1]), np.float32)
        shared = None if shared is None else _floats(shared)
        self._device.combine(rows, _integers(position, np.int64), _floats(weights), shared, out, rounded)
        return out

    def sigmoid_scale(self, x: Floats, gate: Floats) -> Floats:
        x = _floats(x)
        out = np.empty_like(x)
        self._device.sigmoid_scale(x, _floats(gate), out)
        return out

    def head(self, x: Floats, weight: _native.Bank) -> Floats:
        return self.linear(x, weight)


def _floats(array: NDArray[Any]) -> Floats:
    """C-contiguous float32, copied only if it is not contiguous. Another type is a mistake, never narrowed here."""
    if array.dtype is not _F32 and array.dtype != _F32:
        raise TypeError(f"native kernels take float32 arrays, not {array.dtype}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _rows(array: NDArray[Any], narrow: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The same for rows that may be narrow ones as well."""
    return np.ascontiguousarray(array) if array.dtype == narrow else _floats(array)


def _integers(array: Integers, dtype: type[np.integer[Any]]) -> Integers:
    return np.ascontiguousarray(array, dtype)


def _matrix(spec: MatrixSpec) -> _native.Matrix:
    stored = spec.format
    native = _native.Format(stored.kind, stored.group, stored.scale, list(stored.table))
    return _native.Matrix(spec.rows, spec.cols, spec.segments, native)


def _route_shape(spec: MoESpec) -> _native.RouteShape:
    return _native.RouteShape(
        top_k=spec.top_k,
        groups=spec.num_groups,
        topk_groups=spec.topk_groups,
        sigmoid=spec.scoring == "sigmoid",
        top2_sum=spec.group_score == "top2_sum",
        normalize=spec.normalize,
        scale=spec.scale_normalized or not spec.normalize,
        norm_epsilon=spec.norm_epsilon,
        scaling=spec.routed_scaling_factor,
    )


def _shape(spec: AttentionSpec) -> _native.AttentionShape:
    latent = spec.kind == "mla"
    return _native.AttentionShape(
        heads=spec.num_heads,
        groups=1 if latent else spec.num_kv_heads,
        key_dim=spec.latent_width if latent else spec.qk_head_dim,
        value_dim=spec.kv_lora_rank if latent else spec.v_head_dim,
        nope=spec.qk_nope_head_dim,
        rank=spec.kv_lora_rank,
        rope_dim=spec.rope.dim,
        interleaved=spec.rope.interleaved,
        scale=spec.softmax_scale,
        eps=spec.latent_norm_eps if latent else spec.qk_norm_eps,
    )
