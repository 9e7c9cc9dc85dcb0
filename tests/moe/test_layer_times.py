"""Where an MoE layer's time goes: work, waiting and exchanges of each stage, by layer and micro-batch."""

from __future__ import annotations

import itertools

import numpy as np
from moe_ranks import make_exchange, make_layer, placement, stages, tokens

from coterie.comm.exchange import FormPolicy
from coterie.comm.local import LocalTransport
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive_all, interleave
from coterie.observe.trace import Trace, coverage


def test_exchanges_lie_beside_the_laps_of_both_micro_batches() -> None:
    kernels, x, table = NativeKernels(), tokens(12), placement(2, 1, copies=False)
    ranks, traces = [], []
    for transport, rows in zip(LocalTransport.group(2), np.split(x, 2), strict=True):
        layer = make_layer(kernels, make_exchange(transport, table, FormPolicy()), None)
        layer.timer.trace = Trace(transport.rank)
        halves = [stages(kernels, layer, half) for half in np.split(rows, 2)]
        ranks.append(interleave(halves, layer.timer.enter))
        traces.append(layer.timer.trace)
    outputs = [np.concatenate(parts) for parts in drive_all(ranks)]
    assert np.abs(np.concatenate(outputs)).max() > 0.1
    for trace in traces:
        spans = trace.spans()
        assert all(span.layer == 0 and span.begin_ns <= span.end_ns for span in spans)
        for micro_batch in (0, 1):
            own = [span for span in spans if span.micro_batch == micro_batch]
            exchanges = [span.stage for span in own if span.track == "comm"]
            assert exchanges == ["dispatch"] * (len(exchanges) - 1) + ["combine"] and len(exchanges) <= 3
            laps = [span.stage for span in own if span.track == "compute"]
            assert laps.count("wait") == len(exchanges)
            assert laps.index("router") < laps.index("dispatch") < laps.index("experts") < len(laps) - 1
            assert laps[-1] == "combine"
            waits = [index for index, stage in enumerate(laps) if stage == "wait"]
            assert laps[waits[-2] - 1] == "experts", "the shared experts are computed while the rows travel"
        compute = [span for span in spans if span.track == "compute"]
        assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(compute)), "laps follow each other"
        assert coverage(spans).comm_ns > 0
