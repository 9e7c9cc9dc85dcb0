"""What rank processes do in the tests of the forms: the small MoE layer of tests/moe over a real transport."""

from __future__ import annotations

import numpy as np
from moe_ranks import make_exchange, make_layer, placement, stages, tokens

from coterie.comm.exchange import FormPolicy
from coterie.comm.torch_dist import GroupSpec, StoreAddress, connect
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive, interleave

SIZES = {2: [(7, 6), (0, 5), (0, 0)], 4: [(5, 0, 9, 3), (1, 1, 1, 1), (0, 0, 0, 8)]}


def batch(sizes: tuple[int, ...], rank: int) -> np.ndarray:
    """One rank's rows of a batch."""
    return np.split(tokens(sum(sizes), len(sizes)), np.cumsum(sizes)[:-1])[rank]


def run_forms(
    address: StoreAddress, rank: int, size: int, policies: list[FormPolicy], copies: bool
) -> list[list[np.ndarray]]:
    """This rank's outputs of every batch, for every form in turn over one world; two micro-batches in flight."""
    world, kernels = connect(address, GroupSpec(rank, size, timeout=20.0)), NativeKernels()
    table = placement(size, 2, copies=copies)
    layers = [make_layer(kernels, make_exchange(world, table, policy), None) for policy in policies]
    outputs = []
    for layer in layers:
        results = []
        for sizes in SIZES[size]:
            x = batch(sizes, rank)
            halves = np.split(x, [len(x) // 2])
            pair = interleave([stages(kernels, layer, half) for half in halves], lambda index: None)
            results.append(np.concatenate(drive(pair)))
        outputs.append(results)
    assert all(layer.dispatcher.exchange.pool.lent == 0 for layer in layers)  # type: ignore[union-attr]
    return outputs
