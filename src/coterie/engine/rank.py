"""Rank: one of several ranks inside its process, from one generation of the group to the next.

It holds its share of the experts and all of the rest, and requests with their cache; these outlive a generation. To
join one it connects to the other members at the store, loads what experts it lacks, checks that all have the same
placement, and steps with them until all are drained, the group breaks or a newer generation is agreed on. The front
end (`engine.fleet`) says who belongs to a generation and which experts lie where.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Literal

import msgspec
import numpy as np

from coterie.comm.exchange import Exchange
from coterie.comm.form_choice import open_exchange
from coterie.comm.link_use import LinkUse
from coterie.comm.probe import Traffic
from coterie.comm.tensor_group import TensorGroup
from coterie.comm.transport import RankLost, Transport, TransportError, check_agreement
from coterie.comm.travel import Travel
from coterie.engine.build import EngineInfo, Share, load_share
from coterie.engine.core import EngineCore
from coterie.engine.errors import Desynchronised
from coterie.engine.form_trial import FormTrial
from coterie.engine.group import Group
from coterie.engine.messages import Beat, Fault, Leave, Moved, Regroup, Regrouped, ToRank
from coterie.engine.overlap_choice import OverlapChooser, OverlapMode
from coterie.engine.rebalance import RebalancePolicy, Rebalancer, Units
from coterie.engine.remote import is_orphan
from coterie.engine.wire import Wire
from coterie.engine.worker import EngineLoop, deliver_to
from coterie.kernels.native import NativeKernels
from coterie.kernels.select import Choice
from coterie.model.overlap import drive
from coterie.model.shard import ExpertShard
from coterie.model.transformer import Transformer
from coterie.moe.layer import MoELayer
from coterie.observe.expert_load import ExpertLoad
from coterie.spec.errors import CoterieError
from coterie.spec.placement import ExpertPlacement
from coterie.spec.tensor_split import TensorSplit

BEAT_SECONDS = 0.5
"""Between two signs of life."""
CONNECT_SECONDS = 10.0
"""Within which the members of a generation must reach each other, once all have come to the store."""
POLLED_SECONDS = 1.0
"""A meeting asks more often than this whether it was given up."""
FIRST = 1
"""The generation before which nobody waits for answers: only then is there time for trials of the exchange."""
SHORT_STEP = 16
"""Rows of a rank up to which an exchange may use messages of fixed size."""
_log = logging.getLogger(__name__)

Purpose = Literal["control", "serve", "weights"]
Meet = Callable[[Regroup, Purpose], Transport]
"""How this rank comes to a transport of a generation."""


class Seat(msgspec.Struct, frozen=True):
    """A rank's place: its number, where the ranks meet, its experts at first (by unit), the memory it may take.

    `memory` 0: an equal part of the machine's among its `local_size` ranks. `interface`: of the network, None finds
    the one by which the store is reached. `overlap`: two micro-batches a step.
    `tensor`: so many consecutive ranks share requests, of which the first has and schedules them. `patience`: seconds
    that a meeting or an exchange may wait for a rank that lives but computes or loads; whether it gets on is the front
    end's to judge (`Beat`), so this ends only what no rank is to blame for.
    """

    number: int
    store_host: str
    store_port: int
    experts: dict[str, tuple[int, ...]]
    memory: int
    interface: str | None = None
    overlap: OverlapMode = "off"
    rebalance: RebalancePolicy = RebalancePolicy()
    tensor: int = 1
    local_size: int = 1
    patience: float = 120.0

    @property
    def split(self) -> TensorSplit:
        return TensorSplit(self.number % self.tensor, self.tensor)


class Rank:
    """A loaded rank. `join` and the steps are the engine thread's, `interrupt` may be called from another."""

    def __init__(self, core: EngineCore, info: EngineInfo, seat: Seat, meet: Meet | None = None) -> None:
        self.core, self._info, self._seat = core, info, seat
        self._meet = meet or self._connect
        self._held = dict(seat.experts)
        self.choices: tuple[Choice, ...] = ()
        self.rebalancer: Rebalancer | None = None
        self.links = LinkUse()
        self.on_moved: Callable[[Moved], None] = lambda moved: None
        self._moving = None if not seat.rebalance.steps else self._prepare_moves()
        self._generation = self._newest = -1
        self._polled = -POLLED_SECONDS
        self._transports: list[Transport] = []
        self._lock = threading.Lock()

    def join(self, regroup: Regroup) -> tuple[Group, int]:
        """Become a member of a generation; returns its group and how many experts were loaded for it.

        Raises TransportError if members do not come, CoterieError if experts cannot be loaded.
        """
        place = regroup.members.index(self._seat.number)
        control, serve = self._meet(regroup, "control"), self._meet(regroup, "serve")
        weights = None if self._moving is None else self._meet(regroup, "weights")
        self._end_moves()
        with self._lock:
            before, self._transports = self._transports, [control, serve, *([] if weights is None else [weights])]
        for transport in self._transports:
            transport.set_timeout(self._seat.patience)
        placement = self._placement(regroup)
        loaded = self._load(ExpertShard.of(placement, self._info.files.spec, place))
        model = self.core.runner.model
        exchange: Exchange | None = None
        if placement.num_layers:
            exchange, self.choices = self._open(serve, placement, trials=regroup.generation == FIRST)
            self.links.rates, exchange.links = exchange.links.rates, self.links
        tensor = self._tensor_group(serve, place)
        runtime = replace(model.runtime, transport=serve, exchange=exchange, group=tensor)
        if weights is not None and self._moving is not None and exchange is not None:
            runtime = replace(runtime, load=self._moving[1])
            self.rebalancer = Rebalancer(
                self._seat.rebalance,
                weights,
                exchange,
                self._moving,
                lambda layer, row: self.on_moved(Moved(regroup.generation, layer, row.tolist())),
            )
        spec = self._info.files.spec
        self.core.runner.model = Transformer(spec, model.weights, runtime, self._info.max_model_len)
        serve.set_timeout(self._seat.patience)  # of its groups too, which were made since
        check_agreement(control, "the placement of experts", placement.digest())
        self._generation = regroup.generation
        for transport in before:  # only now: members that left together may have been slower to leave
            transport.abort()
        overlap = OverlapChooser(self._seat.overlap)
        return Group(control, regroup.generation, overlap, None if tensor is None else tensor.transport), loaded

    def _tensor_group(self, serve: Transport, place: int) -> TensorGroup | None:
        """Meet the ranks that share requests with this one. Raises CoterieError if their caches differ in size."""
        size, model = self._seat.tensor, self.core.runner.model
        if size == 1:
            return None
        first = place // size * size
        transport = serve.subgroup("tensor", range(first, first + size))
        blocks = self.core.scheduler.pool.num_blocks
        check_agreement(transport, "the size of their caches (give kv_cache_tokens)", f"{blocks} pages")
        return TensorGroup(transport, model.runtime.kernels, model.runtime.timer)

    @property
    def number(self) -> int:
        """Its number in the deployment."""
        return self._seat.number

    @property
    def work(self) -> int:
        """A number that changes while this rank computes or loads, inside a long kernel too; any thread may ask."""
        runner = self.core.runner
        kernels = runner.model.runtime.kernels
        begun = kernels.progress() if isinstance(kernels, NativeKernels) else 0
        return int(begun + sum(runner.timer.totals_ns.values())) % (1 << 62)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, in an exchange or a meeting; any thread may ask."""
        exchanging = any(transport.waiting for transport in self._transports[:2])
        return exchanging or time.monotonic() - self._polled < POLLED_SECONDS

    def interrupt(self, generation: int) -> None:
        """End what this rank waits for in a generation before `generation`, the meeting of its members too."""
        with self._lock:
            self._newest = max(self._newest, generation)
            if generation > self._generation:
                for transport in self._transports:
                    transport.abort()

    def leave(self) -> None:
        """Give the group up, so that its other members notice."""
        with self._lock:
            for transport in self._transports:
                transport.abort()

    def _prepare_moves(self) -> tuple[Units, ExpertLoad]:
        """What outlives generations: the memory of experts with buffers beside it, and the record of their load."""
        model = self.core.runner.model
        units = Units.of(model.weights, model.spec, model.runtime.kernels, self._seat.rebalance.moves)
        layers, moe = zip(*model.spec.moe_layers(), strict=True)
        return units, ExpertLoad(list(layers), moe[0].num_experts, model.runtime.kernels.to_host)

    def _end_moves(self) -> None:
        """Stop moving experts, and note where they have come to lie."""
        if self.rebalancer is None:
            return
        self.rebalancer.stop()
        exchange = self.rebalancer.exchange
        self._held = dict(ExpertShard.of(exchange.placement, self._info.files.spec, exchange.mesh.world.rank).experts)
        self.rebalancer = None

    def _open(
        self, serve: Transport, placement: ExpertPlacement, *, trials: bool
    ) -> tuple[Exchange, tuple[Choice, ...]]:
        spec, config = self._info.files.spec, self._info.config
        top_k, hidden = next(moe.top_k for _, moe in spec.moe_layers()), spec.hidden_size
        small = min(SHORT_STEP, config.max_running_requests)
        feeds = [layer.ffn for layer in self.core.runner.model.layers]
        travel: Travel = next(ffn.dispatcher.travel for ffn in feeds if isinstance(ffn, MoELayer))
        out, back = travel.out_bytes(hidden), travel.back_bytes(hidden)
        traffic = Traffic(out, back, top_k, config.chunked_prefill_size, small)
        trial = FormTrial(travel, placement, hidden, top_k) if trials else None
        exchange, choices = drive(open_exchange(serve, placement, traffic, trial=trial))
        return exchange, choices

    def _connect(self, regroup: Regroup, purpose: Purpose) -> Transport:
        """Meet the other members at the store."""
        from coterie.comm.torch_dist import GroupSpec, StoreAddress, connect  # imported when the process started

        seat = self._seat
        place, size = regroup.members.index(seat.number), len(regroup.members)
        spec = GroupSpec(
            place, size, regroup.generation, purpose, CONNECT_SECONDS, interface=seat.interface, patience=seat.patience
        )
        address = StoreAddress(seat.store_host, seat.store_port)

        def given_up() -> bool:
            self._polled = time.monotonic()
            return self._newest > regroup.generation

        return connect(address, spec, given_up)

    def _placement(self, regroup: Regroup) -> ExpertPlacement:
        spec = self._info.files.spec
        sizes = tuple(regroup.nodes.count(node) for node in dict.fromkeys(regroup.nodes))
        if not any(spec.moe_layers()):
            return ExpertPlacement.without_experts(len(regroup.members), len(sizes), sizes)
        layers, moe = zip(*spec.moe_layers(), strict=True)
        table = np.frombuffer(regroup.slots, "<i4").reshape(len(layers), -1)
        return ExpertPlacement(table, moe[0].num_experts, len(regroup.members), len(sizes), sizes)

    def _load(self, wanted: ExpertShard) -> int:
        """Load the experts that are wanted and not held; if that fails, their slots count as empty."""
        model = self.core.runner.model
        change = wanted.since(ExpertShard(self._held), model.weights)
        if not change.num_experts:
            return 0
        for unit, row in change.experts.items():
            pairs = zip(self._held[unit], row, strict=True)
            self._held[unit] = tuple(old if new < 0 else -1 for old, new in pairs)
        load_share(self._info.files, self._info.config, model.runtime.kernels, share=Share(change, 1 << 62))
        self._held = dict(wanted.experts)
        return change.num_experts


def serve_rank(rank: Rank, wire: Wire[Any], messages: Iterable[ToRank]) -> None:
    """Be a rank for the front end at the other end of a wire, until all are drained or it goes. Ends the process."""
    inbox: SimpleQueue[ToRank | None] = SimpleQueue()
    rank.on_moved = wire.send
    loop = EngineLoop(rank.core, inbox, deliver_to(wire))
    loop.links = rank.links
    ended = threading.Event()

    def read() -> None:
        for message in messages:
            inbox.put(message)
            if isinstance(message, Leave):
                rank.interrupt(message.generation + 1)
            elif isinstance(message, Regroup):
                if not message.gently:
                    rank.interrupt(message.generation)
                sign()
        if not ended.is_set():
            _log.error("the front end is gone; this rank ends")
            os._exit(1)  # the engine's thread may be inside an exchange, and nothing here is worth keeping

    parent = os.getppid()

    def sign() -> None:
        with contextlib.suppress(OSError):  # `read` sees the end
            wire.send(Beat(loop.group.step, rank.work, rank.waits or loop.waits))

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            if is_orphan(parent):
                os._exit(1)
            sign()

    for body, name in ((read, "coterie-wire"), (beat, "coterie-beat")):
        threading.Thread(target=body, name=name, daemon=True).start()
    _generations(rank, loop, wire)
    ended.set()
    wire.close()
    logging.shutdown()
    os._exit(0)  # groups that were given up may still hold threads, for which an orderly end would wait or abort


def _generations(rank: Rank, loop: EngineLoop, wire: Wire[Any]) -> None:
    """One generation after another, until all ranks are drained."""
    regroup: Regroup | None = None
    while True:
        while regroup is None:
            message = loop.next_message()
            if isinstance(message, Regroup):
                regroup = message
            else:
                loop.handle(message)
        asked, regroup = regroup, None
        try:
            loop.group, loaded = rank.join(asked)
            loop.rebalancer = rank.rebalancer
            loop.wake = max(loop.wake, asked.wake)
            choices = [(choice.what, choice.value, choice.reason) for choice in rank.choices]
            wire.send(Regrouped(asked.generation, loaded, choices))
            wire.send(loop.stats())
            regroup = loop.run()
            if regroup is None:
                return
        except CoterieError as error:
            rank.leave()
            if loop.is_drained:  # the first to leave may cut off the last
                return
            _log.warning("rank %d waits for the generation after %d: %s", rank.number, asked.generation, error)
            wire.send(_fault(asked.generation, error))
            regroup = loop.take_regroup()


def _fault(generation: int, error: CoterieError) -> Fault:
    missing = error.missing if isinstance(error, RankLost | Desynchronised) else ()
    own = error.own if isinstance(error, Desynchronised) else not isinstance(error, TransportError)
    return Fault(generation, str(error), list(missing), own)
