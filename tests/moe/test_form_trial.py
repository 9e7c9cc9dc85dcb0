"""FormTrial: every exact form can be tried on local ranks; rows travel, and nothing of it stays."""

from __future__ import annotations

import numpy as np
import pytest
from moe_ranks import EXPERTS, HIDDEN, TOP_K, placement

from coterie.comm.exchange import FormPolicy
from coterie.comm.form_choice import open_exchange
from coterie.comm.local import LocalTransport
from coterie.comm.mesh import Mesh
from coterie.comm.probe import Traffic
from coterie.comm.travel import Travel
from coterie.engine.form_trial import FormTrial
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive_all

KERNELS = NativeKernels()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_rows_travel_in_every_form(copies: bool, rounded: bool) -> None:
    table, travel = placement(4, 2, copies=copies), Travel(KERNELS, rounded=rounded)
    meshes = [Mesh.of(transport, table.node_of_rank) for transport in LocalTransport.group(4)]
    trials = [FormTrial(travel, table, HIDDEN, TOP_K) for _ in meshes]
    for policy in (FormPolicy(), FormPolicy("hierarchical"), FormPolicy(capacity=9)):
        before = meshes[0].bytes_by_hop()[1]
        for _ in range(2):
            took = drive_all([trial(mesh, policy, 9) for trial, mesh in zip(trials, meshes, strict=True)])
            assert min(took) > 0
        assert meshes[0].bytes_by_hop()[1] - before > 2 * 9 * travel.back_bytes(HIDDEN)
        pools = [trial._dispatchers[policy].exchange.pool for trial in trials]  # type: ignore[union-attr]
        assert all(pool.lent == 0 for pool in pools)


def test_an_exchange_opens_after_trials() -> None:
    table, travel = placement(4, 2, copies=True), Travel(KERNELS)
    traffic = Traffic(travel.out_bytes(HIDDEN), travel.back_bytes(HIDDEN), TOP_K, 32, 4)
    trials = [FormTrial(travel, table, HIDDEN, TOP_K) for _ in range(4)]
    worlds = LocalTransport.group(4)
    opened = drive_all([open_exchange(world, table, traffic, trial=trial)
                        for world, trial in zip(worlds, trials, strict=True)])  # fmt: skip
    assert len({(exchange.policy, str(choices)) for exchange, choices in opened}) == 1
    exchange, choices = opened[0]
    assert "fixed capacity" in choices[1].reason.partition("tried: ")[2] and exchange.version == 0
    np.testing.assert_array_equal(exchange.last_counts, np.zeros((1, EXPERTS)))
