"""ReferenceKernels: every op of the device door in plain torch. The oracle of the tests; clear before fast.

Arrays are torch tensors of one activation dtype (float32, or float64: the oracle of oracles); integers are int64.
Weights and caches keep their kind (f32, bf16) and are widened when read. No op writes in place on a path that carries
gradients, so a forward without a cache is differentiable. Letters as in `kernels/api.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.api import HostArray, LatentMaps, Prepared, Regrouped, Routed, SortedRows
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.int8_rows import pack_rows, unpack_rows
from coterie.kernels.quantize import dequantize, quantize
from coterie.spec.cache import CacheKind, CacheStream
from coterie.spec.model import AttentionSpec, MoESpec, RopeSpec
from coterie.spec.rope import cos_sin
from coterie.spec.weights import MatrixSpec, WeightFormat, WeightKind


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceBank:
    """`count` matrices [rows, cols] as one tensor: float32 of the dequantised values, bfloat16 for that format."""

    values: Tensor
    format: WeightFormat

    @property
    def kind(self) -> WeightKind:
        return self.format.kind


class ReferenceKernels:
    """The torch backend. Greedy tokens equal native's unless the top-2 margin is within rounding."""

    name = "reference"

    def __init__(self, dtype: Literal["float32", "float64"] = "float32") -> None:
        self.dtype = torch.float64 if dtype == "float64" else torch.float32

    # ---- weights and tables ------------------------------------------------------------------------------------------
    def allocate(self, count: int, *matrices: MatrixSpec) -> tuple[ReferenceBank, ...]:
        def make(matrix: MatrixSpec) -> ReferenceBank:
            storage = torch.bfloat16 if matrix.format.kind == "bf16" else torch.float32
            return ReferenceBank(torch.zeros(count, matrix.rows, matrix.cols, dtype=storage), matrix.format)

        return tuple(make(matrix) for matrix in matrices)

    def fill(self, bank: ReferenceBank, index: int, row: int, values: HostArray) -> None:
        values = np.ascontiguousarray(values, np.float32)
        if bank.format.is_scaled:
            values = dequantize(bank.format, *quantize(bank.format, values))
        bank.values[index, row : row + len(values)] = torch.from_numpy(values).to(bank.values.dtype)

    def fill_bf16(self, bank: ReferenceBank, index: int, row: int, bits: NDArray[np.uint16]) -> None:
        self.fill(bank, index, row, (bits.astype(np.uint32) << 16).view(np.float32))

    def fill_codes(
        self,
        bank: ReferenceBank,
        index: int,
        row: int,
        codes: NDArray[np.uint8],
        scales: HostArray,
        mins: HostArray | None,
    ) -> None:
        bank.values[index, row : row + len(codes)] = torch.from_numpy(dequantize(bank.format, codes, scales, mins))

    def read(self, bank: ReferenceBank, index: int) -> HostArray:
        return bank.values[index].float().numpy().copy()

    def measure(self, bank: ReferenceBank, index: int, row: int, values: HostArray) -> tuple[float, float]:
        held = bank.values[index, row : row + len(values)].double()
        wanted = torch.from_numpy(np.array(values, np.float64))
        return float(((held - wanted) ** 2).sum()), float((wanted**2).sum())

    def vector(self, values: HostArray) -> Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self.dtype)

    def rope_table(self, rope: RopeSpec, max_positions: int) -> Tensor:
        return torch.from_numpy(cos_sin(rope, max_positions)).to(self.dtype)

    def allocate_cache(self, num_slots: int, stream: CacheStream, kind: CacheKind) -> Tensor:
        if kind == "int8":
            return torch.zeros(num_slots, stream.row_bytes(kind), dtype=torch.uint8)
        return torch.zeros(num_slots, stream.width, dtype=self.dtype if kind == "f32" else torch.bfloat16)

    # ---- one step ----------------------------------------------------------------------------------------------------
    def prepare(self, batch: ForwardBatch) -> Prepared:
        def move(array: NDArray[Any] | None) -> Tensor | None:
            return None if array is None else torch.from_numpy(array.astype(np.int64))

        return Prepared(
            host=batch,
            token_ids=move(batch.token_ids),
            positions=move(batch.positions),
            query_start=move(batch.query_start),
            context_lens=move(batch.context_lens),
            logit_rows=move(batch.logit_rows),
            block_tables=move(batch.block_tables),
            slot_mapping=move(batch.slot_mapping),
            ones_counts=torch.tensor([batch.num_tokens]),
        )

    def to_host(self, array: Tensor) -> NDArray[Any]:
        host = array.detach().numpy()
        return host.astype(np.float32) if host.dtype == np.float64 else host

    def from_host(self, array: NDArray[Any]) -> Tensor:
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self.dtype)
        tensor = torch.from_numpy(array)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor.long()

    def embed(self, table: ReferenceBank, token_ids: Tensor) -> Tensor:
        return table.values[0][token_ids].to(self.dtype)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return self.norm(total, weight, eps), total

    def linear(self, x: Tensor, weight: ReferenceBank, bias: Tensor | None = None) -> Tensor:
        out = x @ weight.values[0].to(self.dtype).T
        return out if bias is None else out + bias

    def head_linear(self, x: Tensor, weight: ReferenceBank) -> Tensor:
        return torch.einsum("tnk,nrk->tnr", x, weight.values.to(self.dtype))

    def mla_inputs(
        self, query: Tensor, kv: Tensor, maps: LatentMaps, positions: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        heads = query.reshape(-1, spec.num_heads, spec.qk_head_dim)
        nope, rope = heads[..., : spec.qk_nope_head_dim], heads[..., spec.qk_nope_head_dim :]
        absorbed = self.head_linear(nope, maps.w_uk)
        angles = maps.rope[positions]
        rotated = _rotate(rope, angles[:, None], interleaved=spec.rope.interleaved)
        latent = self.norm(kv[:, : spec.kv_lora_rank], maps.norm, spec.latent_norm_eps)
        k_rope = _rotate(kv[:, spec.kv_lora_rank :], angles, interleaved=spec.rope.interleaved)
        return torch.cat([absorbed, rotated], -1), torch.cat([latent, k_rope], -1)

    def gqa_inputs(
        self,
        query: Tensor,
        key: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        table: Tensor,
        positions: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor]:
        query = query.reshape(-1, spec.num_heads, spec.qk_head_dim)
        key = key.reshape(-1, spec.num_kv_heads, spec.qk_head_dim)
        if norms is not None:
            query = self.norm(query, norms[0], spec.qk_norm_eps)
            key = self.norm(key, norms[1], spec.qk_norm_eps)
        angles, dim = table[positions][:, None], spec.rope.dim

        def turn(x: Tensor) -> Tensor:
            rotated = _rotate(x[..., :dim], angles, interleaved=spec.rope.interleaved)
            return torch.cat([rotated, x[..., dim:]], -1)

        return turn(query), turn(key).flatten(1)

    def cache_write(self, cache: Tensor, rows: Tensor, batch: Prepared, stream: CacheStream) -> None:
        packed = cache.dtype == torch.uint8
        cache[batch.slot_mapping] = pack_rows(rows.detach(), stream) if packed else rows.detach().to(cache.dtype)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor | None, batch: Prepared, spec: AttentionSpec
    ) -> Tensor:
        host = batch.host
        outputs = []
        for index in range(host.num_sequences):
            start, end = int(host.query_start[index]), int(host.query_start[index + 1])
            if start == end:
                continue
            context = int(host.context_lens[index])
            if batch.block_tables is None:
                slots = torch.arange(start, end)
            else:
                slots = _slots(batch.block_tables[index], context, host.page_size)
            k = self._widen(keys[slots], spec.cache_streams[0])
            v = k[:, : spec.kv_lora_rank] if values is None else self._widen(values[slots], spec.cache_streams[1])
            outputs.append(_attend_one(query[start:end], k, v, batch.positions[start:end], spec))
        width = spec.kv_lora_rank if values is None else spec.v_head_dim
        return torch.cat(outputs) if outputs else query.new_zeros(0, spec.num_heads, width)

    def _widen(self, rows: Tensor, stream: CacheStream) -> Tensor:
        return (unpack_rows(rows, stream) if rows.dtype == torch.uint8 else rows).to(self.dtype)

    def route(self, x: Tensor, gate: ReferenceBank, bias: Tensor | None, spec: MoESpec) -> Routed:
        logits = x @ gate.values[0].to(self.dtype).T
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        choice = scores if bias is None else scores + bias
        if spec.num_groups > 1:
            choice = _mask_groups(choice, spec)
        ids = torch.sort(choice.detach(), dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
        weights = scores.gather(-1, ids)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.norm_epsilon)
        if spec.scale_normalized or not spec.normalize:
            weights = weights * spec.routed_scaling_factor
        return Routed(ids, weights)

    def sort_by_expert(self, expert_ids: Tensor, num_experts: int) -> SortedRows:
        flat = expert_ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order))
        counts = torch.bincount(flat, minlength=num_experts)
        return SortedRows(order // max(expert_ids.shape[1], 1), position.reshape(expert_ids.shape), counts)

    def gather(self, x: Tensor, order: SortedRows) -> Tensor:
        return x[order.token]

    def regroup(self, received: NDArray[np.integer]) -> Regrouped:
        experts = np.tile(np.arange(received.shape[1]), received.shape[0])
        label = torch.from_numpy(np.repeat(experts, received.reshape(-1)))
        order = torch.argsort(label, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return Regrouped(order, inverse, torch.from_numpy(received.sum(0)))

    def concat(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def experts(self, rows: Tensor, counts: Tensor, gate_up: ReferenceBank, down: ReferenceBank) -> Tensor:
        outputs, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            hidden = self._gated(rows[start : start + count], gate_up.values[expert])
            outputs.append(hidden @ down.values[expert].to(self.dtype).T)
            start += count
        return torch.cat(outputs) if outputs else rows.new_zeros(0, rows.shape[1])

    def gated(self, x: Tensor, gate_up: ReferenceBank) -> Tensor:
        return self._gated(x, gate_up.values[0])

    def _gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        both, inner = x @ gate_up.to(self.dtype).T, len(gate_up) // 2
        return torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]

    def narrow(self, rows: Tensor, take: NDArray[np.int64], out: NDArray[np.uint16]) -> None:
        bits = rows.detach()[torch.from_numpy(take)].float().bfloat16().view(torch.int16)
        out[:] = bits.numpy().view(np.uint16)

    def combine(
        self, rows: Tensor, position: Tensor, weights: Tensor, shared: Tensor | None, *, rounded: bool = False
    ) -> Tensor:
        rows = rows.float().bfloat16().to(self.dtype) if rounded else rows
        total = rows[position[:, 0]] * weights[:, :1]
        for k in range(1, position.shape[1]):
            total = total + rows[position[:, k]] * weights[:, k : k + 1]
        return total if shared is None else total + shared

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def head(self, x: Tensor, weight: ReferenceBank) -> Tensor:
        return self.linear(x, weight)


def _rotate(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate all channels of x [..., dim] by angles [..., 2, dim/2] (cos, sin)."""
    cos, sin = angles[..., 0, :], angles[..., 1, :]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _slots(table: Tensor, context: int, page_size: int) -> Tensor:
    positions = torch.arange(context)
    return table[positions // page_size] * page_size + positions % page_size


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """query [T, N, D] over keys [C, G*D] and values [C, G*V] at absolute positions 0..C-1 -> [T, N, V]."""
    context, groups = len(keys), spec.num_kv_heads if spec.kind == "gqa" else 1
    k = keys.reshape(context, groups, -1).repeat_interleave(spec.num_heads // groups, 1)
    v = values.reshape(context, groups, -1).repeat_interleave(spec.num_heads // groups, 1)
    scores = torch.einsum("tnd,cnd->ntc", query, k) * spec.softmax_scale
    future = torch.arange(context)[None, :] > positions[:, None]
    scores = scores.masked_fill(future, float("-inf"))
    return torch.einsum("ntc,cnv->tnv", scores.softmax(-1), v)


def _mask_groups(choice: Tensor, spec: MoESpec) -> Tensor:
    """Exclude with -inf every expert outside the best `topk_groups` groups (ties: lower group)."""
    grouped = choice.reshape(len(choice), spec.num_groups, choice.shape[1] // spec.num_groups)
    if spec.group_score == "max":
        score = grouped.max(-1).values
    else:
        score = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    kept = torch.sort(score, dim=-1, descending=True, stable=True).indices[:, : spec.topk_groups]
    mask = torch.ones_like(score, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(mask[..., None], float("-inf")).reshape(choice.shape)
