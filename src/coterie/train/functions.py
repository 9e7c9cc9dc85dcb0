"""Differentiable pieces of a training step that plain autograd makes slow on a CPU: norms, attention, experts, loss.

Each is one `torch.autograd.Function` with a hand-written backward, checked against plain autograd in the tests. They
compute in the dtype of their activations (bfloat16 in training, float32 when testing) with float32 statistics.
Not here: the door they stand behind (`train/kernels.py`).
Letters: T rows, H hidden, N heads, R latent, D = R + rope, E experts, I inner width, M sorted (token, expert) rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Context = Any
ATTENTION_BLOCK = 128
"""Queries of one attention product: small enough that little of the causal upper triangle is computed."""
LOSS_ROWS = 1024
"""Rows whose logits exist at one time."""
ROW_STEP = 64
"""Expert row counts are rounded up to this for products over rows, so that few matrix shapes occur."""


def _norm_backward(x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    hat = x * rstd
    grad = grad.float()
    weight_grad = (grad * hat).sum(0)
    grad = grad * weight
    inner = (grad * hat).mean(1, keepdim=True)
    return (grad - hat * inner).mul_(rstd), weight_grad


def _norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    rstd = torch.rsqrt(length * length / x.shape[1] + eps)
    return (x * rstd).mul_(weight).to(dtype), rstd


class Norm(torch.autograd.Function):
    """RMSNorm of x [T, H] with float32 statistics; the result is rounded to `dtype`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        out, rstd = _norm_forward(wide, weight, eps, dtype)
        ctx.save_for_backward(wide, rstd, weight)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        grad_x, grad_weight = _norm_backward(x, rstd, weight, grad)
        return grad_x.to(ctx.dtype), grad_weight, None, None


class AddNorm(torch.autograd.Function):
    """(norm(residual + delta), residual + delta); the residual stays float32."""

    @staticmethod
    def forward(
        ctx: Context, delta: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total = residual.float() + delta
        out, rstd = _norm_forward(total, weight, eps, dtype)
        ctx.save_for_backward(total, rstd, weight)
        ctx.dtypes = delta.dtype, residual.dtype
        return out, total

    @staticmethod
    def backward(ctx: Context, grad: Tensor, grad_total: Tensor | None) -> Any:
        x, rstd, weight = ctx.saved_tensors
        grad_x, grad_weight = _norm_backward(x, rstd, weight, grad)
        if grad_total is not None:
            grad_x += grad_total
        delta_type, residual_type = ctx.dtypes
        return grad_x.to(delta_type), grad_x.to(residual_type), grad_weight, None, None


class LatentAttend(torch.autograd.Function):
    """Absorbed attention of B equal sequences: query [B, S, N, D], rows [B, S, D] -> [B, S, N, R].

    All heads read one key row, so heads and queries are rows of one product: [block * N, D] @ [D, keys].
    The probabilities are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Context, query: Tensor, rows: Tensor, scale: float, rank: int) -> Tensor:
        batch, length, heads, width = query.shape
        query = query * scale
        out = query.new_empty(batch, length, heads, rank)
        kept: list[Tensor] = []
        for first in range(0, length, ATTENTION_BLOCK):
            last = min(first + ATTENTION_BLOCK, length)
            block = query[:, first:last].reshape(batch, -1, width)
            keys = rows[:, :last]
            scores = torch.bmm(block, keys.transpose(1, 2))
            scores[:, :, first:].add_(_causal(last - first, heads, scores))
            probability = torch.softmax(scores, 2)
            kept.append(probability)
            out[:, first:last] = torch.bmm(probability, keys[:, :, :rank]).view(batch, -1, heads, rank)
        ctx.save_for_backward(query, rows, out, *kept)
        ctx.scale, ctx.rank = scale, rank
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        query, rows, out, *kept = ctx.saved_tensors
        batch, length, heads, width = query.shape
        rank = ctx.rank
        grad_query = torch.empty_like(query)
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32)
        inner = (grad * out).float().sum(3).to(query.dtype)
        for number, probability in enumerate(kept):
            first = number * ATTENTION_BLOCK
            last = min(first + ATTENTION_BLOCK, length)
            keys = rows[:, :last]
            grad_out = grad[:, first:last].reshape(batch, -1, rank)
            scores = torch.bmm(grad_out, keys[:, :, :rank].transpose(1, 2))
            scores.sub_(inner[:, first:last].reshape(batch, -1, 1)).mul_(probability)
            block = query[:, first:last].reshape(batch, -1, width)
            grad_query[:, first:last] = torch.bmm(scores, keys).view(batch, -1, heads, width)
            grad_rows[:, :last] += torch.bmm(scores.transpose(1, 2), block)
            grad_rows[:, :last, :rank] += torch.bmm(probability.transpose(1, 2), grad_out)
        return grad_query.mul_(ctx.scale), grad_rows.to(rows.dtype), None, None


def _causal(queries: int, heads: int, like: Tensor) -> Tensor:
    """[queries * heads, queries]: 0 where a key is visible, -inf after the query."""
    mask = torch.full((queries, queries), float("-inf"), dtype=like.dtype).triu(1)
    return mask.repeat_interleave(heads, 0)


class GroupedExperts(torch.autograd.Function):
    """down(silu(gate x) * up x) of rows [M, H] sorted by expert; `counts` are the rows of each expert (host integers).

    Products over rows run past an expert's end to a multiple of ROW_STEP; the next expert overwrites what is foreign.
    """

    @staticmethod
    def forward(ctx: Context, rows: Tensor, gate_up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
        gate_up_c, down_c = gate_up.to(rows.dtype), down.to(rows.dtype)
        hidden = _per_expert(rows, gate_up_c.transpose(1, 2), counts)
        inner = hidden.shape[1] // 2
        active = F.silu(hidden[:, :inner].contiguous()).mul_(hidden[:, inner:])
        ctx.save_for_backward(rows, gate_up_c, down_c, hidden, active)
        ctx.counts = counts
        return _per_expert(active, down_c.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        rows, gate_up, down, hidden, active = ctx.saved_tensors
        counts, inner = ctx.counts, hidden.shape[1] // 2
        gate, up = hidden[:, :inner].contiguous(), hidden[:, inner:]
        grad = grad.contiguous()
        grad_active = _per_expert(grad, down, counts)
        grad_hidden = torch.empty_like(hidden)
        sigmoid = torch.sigmoid(gate)  # on contiguous rows: torch vectorises strided bfloat16 badly
        active_gate = sigmoid * gate
        torch.mul(grad_active, active_gate, out=grad_hidden[:, inner:])
        slope = sigmoid + active_gate * (1 - sigmoid)
        torch.mul(grad_active.mul_(up), slope, out=grad_hidden[:, :inner])
        grad_rows = _per_expert(grad_hidden, gate_up, counts)
        grad_gate_up = torch.zeros(gate_up.shape, dtype=torch.float32)
        grad_down = torch.zeros(down.shape, dtype=torch.float32)
        first = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(first, first + count)
                grad_gate_up[expert] = grad_hidden[part].t() @ rows[part]
                grad_down[expert] = grad[part].t() @ active[part]
            first += count
        return grad_rows, grad_gate_up, grad_down, None


def _per_expert(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows [M, a] of each expert @ weights [E, a, b] -> [M, b]."""
    total = rows.shape[0]
    out = rows.new_empty(total, weights.shape[2])
    if len(counts) == 1:
        return torch.mm(rows, weights[0], out=out)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            last = min(first + -(-count // ROW_STEP) * ROW_STEP, total)
            torch.mm(rows[first:last], weights[expert], out=out[first:last])
        first += count
    return out


class Gather(torch.autograd.Function):
    """x [T, H] -> x[token] [M, H]; the backward pass sums the K rows of each token in k order, without atomics."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, token: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        (position,) = ctx.saved_tensors
        return F.embedding_bag(position, grad.contiguous(), mode="sum"), None, None


class Combine(torch.autograd.Function):
    """sum_k weights[t, k] * rows[position[t, k]]: [M, H], [T, K], [T, K] -> [T, H]."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, position: Tensor, weights: Tensor) -> Tensor:
        narrow = weights.to(rows.dtype)
        ctx.save_for_backward(rows, position, narrow)
        return F.embedding_bag(position, rows, mode="sum", per_sample_weights=narrow)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        rows, position, weights = ctx.saved_tensors
        flat = position.reshape(-1)
        pair = torch.empty_like(flat)
        pair[flat] = torch.arange(flat.shape[0])
        spread = grad.contiguous().index_select(0, pair // position.shape[1])
        dots = (spread * rows).float().sum(1)
        grad_rows = spread * weights.reshape(-1)[pair][:, None]
        return grad_rows, None, dots[flat].view(position.shape)


class HeadLoss(torch.autograd.Function):
    """Sum of cross entropies of hidden [T, H] against targets [T] through the head [vocab, H], by blocks of rows.

    Gradients are made in the forward pass, while a block's logits exist.
    """

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        narrow = head.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float64)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32)
        for first in range(0, hidden.shape[0], LOSS_ROWS):
            rows, wanted = hidden[first : first + LOSS_ROWS], targets[first : first + LOSS_ROWS, None]
            probability = torch.softmax((rows @ narrow.t()).float(), 1)
            chosen = probability.gather(1, wanted)
            total -= chosen.clamp_min(1e-38).log().sum(dtype=torch.float64)
            probability.scatter_(1, wanted, chosen - 1)
            grad = probability.to(hidden.dtype)
            torch.mm(grad, narrow, out=grad_hidden[first : first + LOSS_ROWS])
            grad_head += grad.t() @ rows
        ctx.save_for_backward(grad_hidden, grad_head)
        return total.float()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None


class AttachLoss(torch.autograd.Function):
    """Pass `value` through unchanged and add `weight` times a side loss to what is minimised."""

    @staticmethod
    def forward(ctx: Context, value: Tensor, side: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        return grad, grad.new_full((), ctx.weight), None
