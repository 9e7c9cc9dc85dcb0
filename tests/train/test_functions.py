"""Hand-written backward passes against plain autograd of the same mathematics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from coterie.train.functions import (
    AddNorm,
    AttachLoss,
    Combine,
    Gather,
    GroupedExperts,
    HeadLoss,
    LatentAttend,
    Norm,
)

torch.set_num_threads(1)


def same_gradients(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Both give the same value and, for a random cotangent, the same gradients of all inputs."""
    left = [x.clone().requires_grad_() for x in inputs]
    right = [x.clone().requires_grad_() for x in inputs]
    a, b = ours(*left), plain(*right)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn(a.shape, generator=torch.Generator().manual_seed(1))
    (a * cotangent).sum().backward()
    (b * cotangent).sum().backward()
    for x, y in zip(left, right, strict=True):
        assert y.grad is not None
        assert y.grad.abs().max() > 0
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=2e-5)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def test_norm() -> None:
    same_gradients(lambda x, w: Norm.apply(x, w, 1e-6, torch.float32), plain_norm, random(7, 24), random(24, seed=1))


@pytest.mark.parametrize("use", ["both", "norm", "sum"])
def test_add_norm(use: str) -> None:
    def pick(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + 2 * pair[1] if use == "both" else pair[0] if use == "norm" else pair[1] * pair[0].sum()

    same_gradients(
        lambda d, r, w: pick(AddNorm.apply(d, r, w, 1e-6, torch.float32)),
        lambda d, r, w: pick((plain_norm(d + r, w), d + r)),
        random(7, 24),
        random(7, 24, seed=2),
        random(24, seed=1),
    )


@pytest.mark.parametrize("length", [1, 5, 128, 131, 300])
def test_attention_across_block_edges(length: int) -> None:
    heads, rank, width = 3, 8, 12

    def plain(query: Tensor, rows: Tensor) -> Tensor:
        scores = torch.einsum("bqnd,bkd->bnqk", query, rows) * 0.3
        mask = torch.full((length, length), float("-inf")).triu(1)
        return torch.einsum("bnqk,bkr->bqnr", torch.softmax(scores + mask, -1), rows[..., :rank])

    query, rows = random(2, length, heads, width), random(2, length, width, seed=1)
    if length == 1:  # softmax over one key has no gradient for the query
        torch.testing.assert_close(LatentAttend.apply(query, rows, 0.3, rank), plain(query, rows))
        return
    same_gradients(lambda q, r: LatentAttend.apply(q, r, 0.3, rank), plain, query, rows)


@pytest.mark.parametrize("counts", [[50], [3, 0, 70, 129, 1], [0, 0, 5], [64, 64]])
def test_experts_with_empty_and_odd_counts(counts: list[int]) -> None:
    hidden, inner = 16, 6

    def plain(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        out = []
        for expert, part in enumerate(rows.split(counts)):
            gate, up = (part @ gate_up[expert].T).chunk(2, 1)
            out.append((F.silu(gate) * up) @ down[expert].T)
        return torch.cat(out)

    same_gradients(
        lambda r, g, d: GroupedExperts.apply(r, g, d, counts),
        plain,
        random(sum(counts), hidden),
        random(len(counts), 2 * inner, hidden, seed=1),
        random(len(counts), hidden, inner, seed=2),
    )


def test_gather_and_combine() -> None:
    tokens, top, hidden = 9, 3, 5
    order = torch.randperm(tokens * top, generator=torch.Generator().manual_seed(4))
    position = torch.empty_like(order)
    position[order] = torch.arange(tokens * top)
    position = position.view(tokens, top)
    same_gradients(lambda x: Gather.apply(x, order // top, position), lambda x: x[order // top], random(tokens, hidden))
    same_gradients(
        lambda rows, w: Combine.apply(rows, position, w),
        lambda rows, w: (rows[position] * w[..., None]).sum(1),
        random(tokens * top, hidden),
        random(tokens, top, seed=1),
    )


def test_head_loss_over_several_blocks() -> None:
    targets = torch.randint(0, 33, (2100,), generator=torch.Generator().manual_seed(0))
    hidden, head = random(2100, 6), random(33, 6, seed=1)
    same_gradients(
        lambda h, w: HeadLoss.apply(h, w, targets) / 2100,
        lambda h, w: F.cross_entropy(h @ w.T, targets),
        hidden,
        head,
    )


def test_attached_loss_adds_its_gradient_and_changes_no_value() -> None:
    x = random(4).requires_grad_()
    value = AttachLoss.apply(x, (x * x).sum(), 0.5)
    assert torch.equal(value, x)
    value.sum().backward()
    torch.testing.assert_close(x.grad, 1 + 0.5 * 2 * x.detach())
