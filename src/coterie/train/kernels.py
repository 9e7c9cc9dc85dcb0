"""TrainKernels: the device door for training, in torch, with Parameters as banks and hand-written backward passes.

A bank is a float32 `Parameter` [count, rows, cols]; activations are `compute` (bfloat16, or float32 in tests). Only
packed batches without a cache are run; cached inference belongs to the other backends. Same meaning as `reference`,
tested against it. Not bit-stable across batch shapes: training does not need that promise.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from coterie.kernels.api import HostArray, LatentMaps, Prepared, Regrouped, Routed, SortedRows
from coterie.kernels.batch import ForwardBatch
from coterie.spec.cache import CacheKind, CacheStream
from coterie.spec.model import AttentionSpec, MoESpec, RopeSpec
from coterie.spec.rope import cos_sin
from coterie.spec.weights import MatrixSpec
from coterie.train.functions import AddNorm, AttachLoss, Combine, Gather, GroupedExperts, LatentAttend, Norm

_NO_CACHE = "training kernels run packed sequences only; use the native or reference backend for a paged cache"


class TrainKernels:
    """Kernels whose ops are differentiable. `balance` weighs the sequence-wise balance loss (0: none)."""

    name = "train"

    def __init__(self, compute: torch.dtype = torch.bfloat16, balance: float = 0.0) -> None:
        self.compute = compute
        self.balance = balance
        self._sequences = 1

    # ---- weights and tables --------------------------------------------------------------------------------------
    def allocate(self, count: int, *matrices: MatrixSpec) -> tuple[Parameter, ...]:
        """Zero float32 masters; a format says how they are exported, not how they are trained."""
        return tuple(Parameter(torch.zeros(count, matrix.rows, matrix.cols)) for matrix in matrices)

    def fill(self, bank: Parameter, index: int, row: int, values: HostArray) -> None:
        with torch.no_grad():
            bank[index, row : row + len(values)] = torch.from_numpy(np.array(values, np.float32))

    def fill_bf16(self, bank: Parameter, index: int, row: int, bits: NDArray[np.uint16]) -> None:
        self.fill(bank, index, row, (bits.astype(np.uint32) << 16).view(np.float32))

    def fill_codes(
        self, bank: Parameter, index: int, row: int, codes: NDArray[np.uint8], scales: HostArray, mins: Any
    ) -> None:
        raise NotImplementedError("training holds float32 weights: load an unquantised checkpoint")

    def measure(self, bank: Parameter, index: int, row: int, values: HostArray) -> tuple[float, float]:
        raise NotImplementedError("training holds float32 weights: nothing is rounded")

    def read(self, bank: Parameter, index: int) -> HostArray:
        out: HostArray = bank[index].detach().numpy().copy()
        return out

    def vector(self, values: HostArray) -> Parameter:
        return Parameter(torch.from_numpy(np.array(values, np.float32)))

    def rope_table(self, rope: RopeSpec, max_positions: int) -> Tensor:
        return torch.from_numpy(cos_sin(rope, max_positions))

    def allocate_cache(self, num_slots: int, stream: CacheStream, kind: CacheKind) -> Tensor:
        raise NotImplementedError(_NO_CACHE)

    def cache_write(self, cache: Tensor, rows: Tensor, batch: Prepared, stream: CacheStream) -> None:
        raise NotImplementedError(_NO_CACHE)

    # ---- one step ------------------------------------------------------------------------------------------------
    def prepare(self, batch: ForwardBatch) -> Prepared:
        if batch.block_tables is not None:
            raise NotImplementedError(_NO_CACHE)
        self._sequences = batch.num_sequences
        return Prepared(
            host=batch,
            token_ids=torch.from_numpy(batch.token_ids).long(),
            positions=torch.from_numpy(batch.positions).long(),
            query_start=torch.from_numpy(batch.query_start),
            context_lens=torch.from_numpy(batch.context_lens),
            logit_rows=torch.from_numpy(batch.logit_rows).long(),
            block_tables=None,
            slot_mapping=None,
            ones_counts=torch.tensor([batch.num_tokens]),
        )

    def to_host(self, array: Tensor) -> NDArray[Any]:
        tensor = array.detach()
        out: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        return out

    def from_host(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def embed(self, table: Parameter, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, table[0])

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return Norm.apply(x, weight, eps, self.compute)

    def add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return AddNorm.apply(delta, residual, weight, eps, self.compute)

    def linear(self, x: Tensor, weight: Parameter, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.to(self.compute), weight[0].to(self.compute), None if bias is None else bias.to(self.compute))

    def head_linear(self, x: Tensor, weight: Parameter) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight.to(self.compute).transpose(1, 2)).transpose(0, 1)

    def mla_inputs(
        self, query: Tensor, kv: Tensor, maps: LatentMaps, positions: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        rank, nope = spec.kv_lora_rank, spec.qk_nope_head_dim
        angles = maps.rope[positions].to(self.compute)
        query = query.view(-1, spec.num_heads, spec.qk_head_dim)
        absorbed = self.head_linear(query[..., :nope], maps.w_uk)
        turned = _rotate(query[..., nope:], angles[:, None], interleaved=spec.rope.interleaved)
        latent = Norm.apply(kv[:, :rank], maps.norm, spec.latent_norm_eps, self.compute)
        key = _rotate(kv[:, rank:], angles, interleaved=spec.rope.interleaved)
        return torch.cat([absorbed, turned], 2), torch.cat([latent, key], 1)

    def gqa_inputs(
        self,
        query: Tensor,
        key: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        table: Tensor,
        positions: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor]:
        angles = table[positions].to(self.compute)[:, None]
        turned = []
        for index, x in enumerate((query, key)):
            heads = x.reshape(-1, spec.qk_head_dim)
            if norms is not None:
                heads = Norm.apply(heads, norms[index], spec.qk_norm_eps, self.compute)
            heads = heads.view(x.shape[0], -1, spec.qk_head_dim)
            dim = spec.rope.dim
            rotated = _rotate(heads[..., :dim], angles, interleaved=spec.rope.interleaved)
            turned.append(torch.cat([rotated, heads[..., dim:]], 2))
        return turned[0], turned[1].reshape(key.shape)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor | None, batch: Prepared, spec: AttentionSpec
    ) -> Tensor:
        starts = batch.host.query_start
        lengths = starts[1:] - starts[:-1]
        if len(lengths) and (lengths == lengths[0]).all():
            return self._attend_equal(query, keys, values, len(lengths), spec)
        parts = [
            self._attend_equal(query[a:b], keys[a:b], None if values is None else values[a:b], 1, spec)
            for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        width = spec.kv_lora_rank if values is None else spec.v_head_dim
        return torch.cat(parts) if parts else query.new_zeros(0, spec.num_heads, width)

    def _attend_equal(
        self, query: Tensor, keys: Tensor, values: Tensor | None, count: int, spec: AttentionSpec
    ) -> Tensor:
        query = query.reshape(count, -1, spec.num_heads, query.shape[2])
        if values is None:
            rows = keys.reshape(count, -1, keys.shape[1])
            out = LatentAttend.apply(query, rows, spec.softmax_scale, spec.kv_lora_rank)
            return out.reshape(-1, spec.num_heads, spec.kv_lora_rank)
        key = keys.reshape(count, -1, spec.num_kv_heads, spec.qk_head_dim).transpose(1, 2)
        value = values.reshape(count, -1, spec.num_kv_heads, spec.v_head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, is_causal=True, scale=spec.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(-1, spec.num_heads, spec.v_head_dim)

    def route(self, x: Tensor, gate: Parameter, bias: Tensor | None, spec: MoESpec) -> Routed:
        logits = F.linear(x.float(), gate[0])
        scores = torch.sigmoid(logits) if spec.scoring == "sigmoid" else torch.softmax(logits, 1)
        with torch.no_grad():
            ranked = scores if bias is None else scores + bias
            ids = torch.topk(_exclude_groups(ranked, spec), spec.top_k, dim=1, sorted=True)[1]
        if self.balance > 0 and scores.requires_grad:
            scores = AttachLoss.apply(scores, self._sequence_balance(scores, ids, spec), self.balance)
        weights = scores.gather(1, ids)
        if spec.normalize:
            weights = weights / (weights.sum(1, keepdim=True) + spec.norm_epsilon)
        if not spec.normalize or spec.scale_normalized:
            weights = weights * spec.routed_scaling_factor
        return Routed(ids, weights)

    def _sequence_balance(self, scores: Tensor, ids: Tensor, spec: MoESpec) -> Tensor:
        """DeepSeek-V3 equations 17-20: E / (K S) * counts times the mean normalised score, averaged over sequences."""
        shares = (scores / scores.sum(1, keepdim=True)).view(self._sequences, -1, spec.num_experts).mean(1)
        hits = torch.zeros_like(scores).scatter_(1, ids, 1.0).view(self._sequences, -1, spec.num_experts).mean(1)
        return (hits * shares).sum() * (spec.num_experts / spec.top_k / self._sequences)

    def sort_by_expert(self, expert_ids: Tensor, num_experts: int) -> SortedRows:
        flat = expert_ids.reshape(-1)
        order = torch.sort(flat.to(torch.int16), stable=True)[1]
        position = torch.empty_like(order)
        position[order] = torch.arange(order.shape[0])
        counts = torch.bincount(flat, minlength=num_experts)
        return SortedRows(order // expert_ids.shape[1], position.view(expert_ids.shape), counts)

    def gather(self, x: Tensor, order: SortedRows) -> Tensor:
        """x[order.token], with a backward pass that sums each token's rows in k order."""
        return Gather.apply(x, order.token, order.position)

    def regroup(self, received: NDArray[np.integer]) -> Regrouped:
        ranks, experts = received.shape
        label = np.repeat(np.tile(np.arange(experts), ranks), received.reshape(-1))
        order = np.argsort(label, kind="stable")
        return Regrouped(
            torch.from_numpy(order), torch.from_numpy(np.argsort(order)), torch.from_numpy(received.sum(0))
        )

    def concat(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def experts(self, rows: Tensor, counts: Tensor, gate_up: Parameter, down: Parameter) -> Tensor:
        return GroupedExperts.apply(rows.to(self.compute), gate_up, down, counts.tolist())

    def gated(self, x: Tensor, gate_up: Parameter) -> Tensor:
        gate, up = (x.to(self.compute) @ gate_up[0].to(self.compute).T).chunk(2, -1)
        return F.silu(gate) * up

    def narrow(self, rows: Tensor, take: NDArray[np.int64], out: NDArray[np.uint16]) -> None:
        raise NotImplementedError("training has one rank")

    def combine(
        self, rows: Tensor, position: Tensor, weights: Tensor, shared: Tensor | None, *, rounded: bool = False
    ) -> Tensor:
        rows = rows.bfloat16().to(rows.dtype) if rounded else rows
        out = Combine.apply(rows, position, weights)
        return out if shared is None else out + shared

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate)

    def head(self, x: Tensor, weight: Parameter) -> Tensor:
        return self.linear(x, weight).float()


def _rotate(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """x [..., dim] by angles [..., 2, dim/2] (cos, sin)."""
    cos, sin = angles[..., 0, :], angles[..., 1, :]
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def _exclude_groups(ranked: Tensor, spec: MoESpec) -> Tensor:
    """Scores with all experts outside the best `topk_groups` groups at -inf."""
    if spec.num_groups <= 1:
        return ranked
    grouped = ranked.view(ranked.shape[0], spec.num_groups, -1)
    strength = grouped.amax(2) if spec.group_score == "max" else grouped.topk(min(2, grouped.shape[2]), dim=2)[0].sum(2)
    kept = torch.zeros_like(strength).scatter_(1, strength.topk(spec.topk_groups, dim=1)[1], 1.0)
    return grouped.masked_fill(kept[:, :, None] == 0, float("-inf")).view_as(ranked)


Compute = Literal["bfloat16", "float32"]
COMPUTE_TYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
