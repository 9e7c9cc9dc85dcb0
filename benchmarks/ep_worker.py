"""A rank of ep.py: one process in one "host". JSON lines as in worker_loop.py.

    python benchmarks/ep_worker.py store HOST        hosts the ranks' store, answers with its port
    python benchmarks/ep_worker.py rank              joins it and measures what it is asked

Measured is dispatch and combine and nothing else, and the result is checked. Rows "float32" both ways: the experts'
place is taken by the rows themselves, so every form must give sums of the token's own row by its weights. Rows
"narrow": int8 out and bf16 back, through small int8 experts of which every rank has all, to know what must come out.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from ep_stack import Stack
from worker_loop import answer_requests

from coterie.comm.exchange import Exchange, FormPolicy
from coterie.comm.form_choice import open_exchange, settle
from coterie.comm.mesh import Mesh
from coterie.comm.probe import Traffic, choose, probe_links
from coterie.comm.torch_dist import GroupSpec, StoreAddress, StoreHost, connect
from coterie.comm.travel import Travel
from coterie.engine.form_trial import FormTrial
from coterie.kernels.api import Bank, Routed
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive
from coterie.moe.dispatch import Dispatcher
from coterie.spec.placement import ExpertPlacement
from coterie.spec.weights import MatrixSpec, WeightFormat

INNER = 32
"""Of the small experts."""


class Store:
    """The meeting point, in a namespace that no host owns."""

    def __init__(self, host: str) -> None:
        self.host = StoreHost(host)

    def port(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"port": self.host.address.port}


class Rank:
    """One rank; `join` comes first."""

    def join(self, request: dict[str, Any]) -> dict[str, Any]:
        """Connect: store, rank, size, nodes, racks, and the shape of the layer."""
        address = StoreAddress(request["host"], request["port"])
        self.rank, self.size = request["rank"], request["size"]
        self.hidden, self.top_k, self.experts = request["hidden"], request["top_k"], request["experts"]
        self.world = connect(address, GroupSpec(self.rank, self.size, timeout=60.0))
        self.placement = ExpertPlacement.linear(1, self.experts, self.size, request["nodes"])
        self.mesh = Mesh.of(self.world, self.placement.node_of_rank, request["racks"])
        self.kernels = NativeKernels(1)
        self.serving: Dispatcher | None = None
        self._made: dict[tuple[str, FormPolicy], Dispatcher] = {}
        per_rank = self.experts // self.size
        self.banks = self._experts(range(self.experts))
        self.own = self._experts(range(self.rank * per_rank, (self.rank + 1) * per_rank))
        return {"rank": self.rank}

    def _experts(self, which: range) -> tuple[Bank, Bank]:
        """gate_up and down of some of the small experts, the same on all ranks."""
        format, kernels = WeightFormat("int8", 32, "f16"), self.kernels
        specs = MatrixSpec(2 * INNER, self.hidden, format, 2), MatrixSpec(self.hidden, INNER, format)
        banks = kernels.allocate(len(which), *specs)
        for index, expert in enumerate(which):
            rng = np.random.default_rng([9, expert])
            for bank, spec in zip(banks, specs, strict=True):
                kernels.fill(bank, index, 0, (rng.normal(size=(spec.rows, spec.cols)) * 0.1).astype(np.float32))
        gate_up, down = banks
        return gate_up, down

    def _travel(self, rows: str) -> Travel:
        """What a row is on its way."""
        narrow = rows == "narrow"
        return Travel(self.kernels, self.own[0] if narrow else None, rounded=narrow)

    def _traffic(self, request: dict[str, Any], tokens: int, small: int = 0) -> Traffic:
        travel = self._travel(request["rows"])
        return Traffic(travel.out_bytes(self.hidden), travel.back_bytes(self.hidden), self.top_k, tokens, small)

    def _trial(self, request: dict[str, Any]) -> FormTrial:
        return FormTrial(self._travel(request["rows"]), self.placement, self.hidden, self.top_k)

    def probe(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the links do now, the forms that are expected to be fastest (exact; any), and those that trials find;
        what is said of these, and how long they took."""
        links = drive(probe_links(self.mesh))
        traffic = self._traffic(request, request["tokens"], request["small"])
        policy, _ = choose(self.mesh, links, traffic)
        any_form, _ = choose(self.mesh, links, traffic, exact=False)
        start = time.monotonic()
        tried, chosen = drive(settle(self.mesh, links, traffic, self._trial(request)))
        return {"links": str(links), "inside": links.inside, "between": links.between, "any": any_form.sized,
                "expected": [policy.sized, policy.capacity], "tried": [tried.sized, tried.capacity],
                "reasons": [choice.reason for choice in chosen], "seconds": time.monotonic() - start}  # fmt: skip

    def compare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each round of several (form, capacity), in turns."""
        x, routed, want = self._batch(request)
        forms = []
        for form, capacity in request["forms"]:
            exchange = Exchange(self.mesh, self.placement, FormPolicy(form, capacity))
            forms.append(Dispatcher(self.experts, self.kernels, exchange, 0, self._travel(request["rows"])))
            if not np.array_equal(self._round(forms[-1], x, routed)[1], want):
                raise AssertionError(f"{form}: the result is not that of one rank")
        return {"seconds": [[sum(self._round(dispatcher, x, routed)[0]) for dispatcher in forms]
                            for _ in range(request["rounds"])]}  # fmt: skip

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Rounds through an exchange that chooses its form itself, by a probe and then by what it sees; the form after
        each. The exchange is kept for later requests."""
        if self.serving is None:
            traffic, trial = self._traffic(request, request["traffic"]), self._trial(request)
            exchange, _ = drive(open_exchange(self.world, self.placement, traffic, trial=trial))
            self.serving = Dispatcher(self.experts, self.kernels, exchange, 0, self._travel(request["rows"]))
        exchange = self.serving.exchange
        assert exchange is not None
        x, routed, want = self._batch(request)
        forms = []
        for _ in range(request["rounds"]):
            out = self._round(self.serving, x, routed)[1]
            if not np.array_equal(out, want):
                raise AssertionError(f"the {exchange.policy.sized} form changed the result")
            forms.append(exchange.policy.sized)
        return {"forms": forms}

    def _batch(self, request: dict[str, Any]) -> tuple[np.ndarray, Routed, np.ndarray]:
        """Rows, their routing, and what dispatch, experts and combine must give."""
        tokens, narrow = request["tokens"], request["rows"] == "narrow"
        rng = np.random.default_rng([request["seed"], self.rank])
        x = rng.normal(size=(tokens, self.hidden)).astype(np.float32)
        ids = np.argsort(rng.random((tokens, self.experts)), axis=1)[:, : self.top_k].astype(np.int32)
        routed = Routed(ids, rng.random((tokens, self.top_k)).astype(np.float32))
        order = self.kernels.sort_by_expert(ids, self.experts)
        rows = self.kernels.gather(x, order)
        if narrow:
            rows = self.kernels.experts(rows, order.counts, *self.banks)
        return x, routed, self.kernels.combine(rows, order.position, routed.expert_weights, None, rounded=narrow)

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of dispatch and of combine of each round, every one checked, and bytes by hop class per round. What a
        policy needs is kept for the next request."""
        policy, rows = FormPolicy(request["form"], request["capacity"], request["piece_bytes"]), request["rows"]
        if (rows, policy) not in self._made:
            exchange = Exchange(self.mesh, self.placement, policy)
            self._made[rows, policy] = Dispatcher(self.experts, self.kernels, exchange, 0, self._travel(rows))
        x, routed, want = self._batch(request)
        most = 0.0 if policy.exact else 1e-4 if rows == "float32" else 0.02 * float(np.abs(want).max())
        before, seconds = self.mesh.bytes_by_hop(), []
        for _ in range(request["rounds"]):
            spent, out = self._round(self._made[rows, policy], x, routed)
            seconds.append(spent)
            error = float(np.abs(out - want).max())
            if error > most:
                raise AssertionError(f"{policy}: the result is off by {error:g}")
        after = self.mesh.bytes_by_hop()
        return {"seconds": seconds, "hops": [(b - a) / request["rounds"] for a, b in zip(before, after, strict=True)]}

    def overlap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Steps of a stack of layers, overlapped and not (ep_overlap.py)."""
        return Stack(self.mesh, self.placement, FormPolicy(request["form"], 0), request).measure(request)

    def _round(self, dispatcher: Dispatcher, x: np.ndarray, routed: Routed) -> tuple[tuple[float, float], np.ndarray]:
        self.world.all_gather(np.zeros(1, np.int64)).result()
        start = time.monotonic()
        dispatched = drive(dispatcher.dispatch(x, routed))
        middle = time.monotonic()
        outputs = dispatched.rows
        if outputs.dtype == np.uint8:  # narrow ones
            outputs = self.kernels.experts(outputs, dispatched.counts, *self.own)
        computed = time.monotonic()
        out = drive(dispatcher.combine(outputs, dispatched, routed, None))
        return (middle - start, time.monotonic() - computed), out


if __name__ == "__main__":
    if sys.argv[1] == "store":
        answer_requests(lambda: Store(sys.argv[2]))
    else:
        answer_requests(Rank)
