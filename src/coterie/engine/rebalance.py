"""Rebalancer: moves experts between ranks while they serve, a few per layer, so that load stays even.

After every `steps` steps with work the ranks gather what their tokens asked for since the last time and all compute the
same placement (`spec.balance`). A thread then exchanges the experts of one layer after the other over a group of its
own, in bounded chunks with a rate limit, into buffers that were allocated at the start, and checks them. The engine's
thread takes a layer over (weights into slots, the row of the placement) between two steps, when all ranks have said in
the control exchange before that step that they hold it. Until then, and if anything fails, the old placement serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.comm.exchange import Exchange
from coterie.comm.transport import Int64, Transport, TransportError
from coterie.kernels import _native
from coterie.kernels.api import Kernels
from coterie.kernels.native import NativeKernels
from coterie.observe.expert_load import ExpertLoad
from coterie.spec.balance import Room, moves, place
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.placement import ExpertPlacement

Bytes = NDArray[np.uint8]
_log = logging.getLogger(__name__)

FAILED = -1
CHUNK = 64 * 1024
"""Bytes that a rank sends to each other rank at once."""


class RebalancePolicy(msgspec.Struct, frozen=True):
    """steps: between two decisions, 0 never; moves: at most, in each layer; rate: bytes a second that a rank sends."""

    steps: int = 0
    moves: int = 8
    rate: float = 32e6


class Move(NamedTuple):
    """An expert that a rank must receive: from a slot of another rank into a slot of its own."""

    expert: int
    source: int
    target: int


def plan_moves(before: ExpertPlacement, after: ExpertPlacement, layer: int) -> tuple[Move, ...]:
    """What must travel for one layer; sources on the target's node first, then whoever sends least."""
    per_rank, node_of = before.slots_per_rank, before.node_of_rank
    old, new = before.slot_to_expert[layer], after.slot_to_expert[layer]
    copies, sends, found = before.copies(layer), [0] * before.num_ranks, []
    for target in np.flatnonzero(new != old).tolist():
        expert, rank = int(new[target]), target // per_rank
        holding = [int(slot) for slot in copies[expert] if slot >= 0]
        source = min(
            holding, key=lambda slot: (node_of[slot // per_rank] != node_of[rank], sends[slot // per_rank], slot)
        )
        sends[source // per_rank] += 1
        found.append(Move(expert, source, target))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The memory of this rank's experts by MoE layer [slots, bytes], and buffers [moves, most bytes] for new ones.

    A unit is all that belongs to an expert: codes, scales and minima of both its matrices.
    """

    layers: Sequence[Bytes]
    buffers: Bytes

    @classmethod
    def of(cls, weights: Mapping[str, Any], spec: ModelSpec, kernels: Kernels, most_moves: int) -> Units:
        """Allocates and touches the buffers. Raises CoterieError for a backend that does not say where experts lie."""
        layers = _units(weights, spec, kernels)
        buffers = np.empty((most_moves, max(units.shape[1] for units in layers)), np.uint8)
        buffers.fill(0)
        return cls(layers, buffers)

    @staticmethod
    def buffer_bytes(weights: Mapping[str, Any], spec: ModelSpec, kernels: Kernels, most_moves: int) -> int:
        """What the buffers take, for the memory plan."""
        return most_moves * max(units.shape[1] for units in _units(weights, spec, kernels))


def _units(weights: Mapping[str, Any], spec: ModelSpec, kernels: Kernels) -> list[Bytes]:
    if not isinstance(kernels, NativeKernels):
        raise CoterieError("experts can be moved while serving with the native backend only; use --rebalance-steps 0")
    return [kernels.units(weights[f"layers.{index}.ffn.gate_up"]) for index, _ in spec.moe_layers()]


class Rebalancer:
    """One rank's part in one generation. `after_step` is the engine thread's; `stop` ends it for good."""

    def __init__(
        self, policy: RebalancePolicy, transport: Transport, exchange: Exchange, units: Units, load: ExpertLoad
    ) -> None:
        self.policy, self.exchange, self._units, self._load = policy, exchange, units, load
        self._mover = Mover(transport, units, policy)
        self._before = load.read()
        self._steps = self._applied = 0
        self._busy = False
        self.moved = self.cycles = 0
        self.failure: str | None = None

    @property
    def progress(self) -> int:
        """What this rank says before a step: parts of the work that it has done, FAILED once it cannot go on."""
        return FAILED if self.failure is not None else self._mover.progress

    def after_step(self, slowest: int) -> int:
        """At the end of a step with work; `slowest`: the least progress of all ranks before it. All ranks do alike.

        Returns how many experts this rank has taken over, FAILED when it gives up.
        """
        if self.failure is not None:
            return 0
        if slowest == FAILED:
            self._give_up(self._mover.error or "another rank could not go on")
            return FAILED
        before = self.moved
        while self._busy and self._applied < slowest:
            self._applied += 1
            self._apply(self._mover.take())
        self._steps += 1
        if not self._busy and self._steps >= self.policy.steps:
            counts = self._load.read()
            window, self._before = counts - self._before, counts
            self._busy = True
            self._mover.begin(window, self.exchange.placement)
        return self.moved - before

    def stop(self) -> None:
        """End the thread's waiting; what it had not delivered is lost, which nobody needs."""
        self._mover.stop()

    def _apply(self, arrived: Arrived | None) -> None:
        if arrived is None:
            self._busy, self._steps = False, 0
            self.cycles += 1
            return
        memory = self._units.layers[arrived.layer]
        first = self.exchange.own_slots.start
        for index, slot in enumerate(arrived.slots):
            memory[slot - first] = self._units.buffers[index, : memory.shape[1]]
        self._mover.release()
        self.exchange.install_layer(arrived.layer, arrived.row)
        self.moved += len(arrived.slots)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._mover.stop()
        _log.warning("experts stay where they are: %s", reason)


class Arrived(NamedTuple):
    """A layer whose new experts are in the buffers: this rank's slots for them, in order, and the whole new row."""

    layer: int
    slots: tuple[int, ...]
    row: NDArray[np.int32]


class Mover:
    """The thread. A cycle is `begin`, then for every layer that changes one `take` and `release` once `progress` has
    grown, then one `take` that gives None. Between progress and release the buffers are the taker's."""

    def __init__(self, transport: Transport, units: Units, policy: RebalancePolicy) -> None:
        self._transport, self._units, self._policy = transport, units, policy
        self._changed = threading.Condition()
        self._asked: tuple[Int64, ExpertPlacement] | None = None
        self._ready: list[Arrived | None] = []
        self._done = 0
        self._held = self._stopped = False
        self._not_before = 0.0
        self._checksums: dict[tuple[int, int], int] = {}
        self.error: str | None = None
        threading.Thread(target=self._run, name="coterie-moves", daemon=True).start()

    @property
    def progress(self) -> int:
        """Layers and ends of cycles delivered, FAILED after an error."""
        return FAILED if self.error is not None else self._done

    def begin(self, window: Int64, placement: ExpertPlacement) -> None:
        """Decide on this rank's window of counts [L, E] and on those of the others, and move."""
        with self._changed:
            self._asked = window, placement
            self._changed.notify_all()

    def take(self) -> Arrived | None:
        """The oldest delivery."""
        with self._changed:
            return self._ready.pop(0)

    def release(self) -> None:
        """The delivery was copied; the buffers may be filled again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def stop(self) -> None:
        """End whatever the thread waits for, and the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._transport.abort()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._asked is not None)
                    asked, self._asked = self._asked, None
                if self._stopped or asked is None:
                    return
                self._cycle(*asked)
        except Exception as error:
            if not self._stopped:
                self.error = f"moving experts failed: {type(error).__name__}: {error}"

    def _cycle(self, window: Int64, before: ExpertPlacement) -> None:
        gathered: Int64 = self._transport.all_gather(window.reshape(-1)).result()
        after = self._decide(gathered.sum(0).reshape(window.shape), before)
        for layer in np.flatnonzero(moves(before, after)).tolist():
            wanted = plan_moves(before, after, layer)
            streams = Streams(wanted, self._transport, before.slots_per_rank, self._units.layers[layer])
            self._exchange(streams)
            self._check(layer, wanted, streams)
            slots = tuple(move.target for move in streams.arriving)
            self._deliver(Arrived(layer, slots, after.slot_to_expert[layer]))
            if self._stopped:
                return
        self._deliver(None)

    def _decide(self, load: Int64, before: ExpertPlacement) -> ExpertPlacement:
        sizes = tuple(np.bincount(before.node_of_rank).tolist())
        room = Room(num_slots=before.num_slots, num_ranks=before.num_ranks, num_nodes=sizes)
        return place(load, room, current=before, max_moves=len(self._units.buffers))

    def _exchange(self, streams: Streams) -> None:
        """Send and receive one layer's experts, a chunk to each rank at a time."""
        transport, ranks = self._transport, range(self._transport.size)
        for begin in range(0, streams.longest, CHUNK):
            parts = [streams.outgoing(rank, begin, begin + CHUNK) for rank in ranks]
            received = [streams.incoming_bytes(rank, begin, begin + CHUNK) for rank in ranks]
            self._wait_for_rate(sum(len(part) for part in parts))
            rows = np.concatenate(parts)
            landed = transport.all_to_all_v(rows, [len(part) for part in parts], received).result()
            streams.land(landed, received, begin, self._units.buffers)

    def _wait_for_rate(self, nbytes: int) -> None:
        now = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, max(0.0, self._not_before - now))
        self._not_before = max(now, self._not_before) + nbytes / self._policy.rate

    def _check(self, layer: int, wanted: Sequence[Move], streams: Streams) -> None:
        """What arrived is what was sent, and what every copy of the expert has been so far."""
        said = np.zeros(len(wanted), np.int64)
        for number, unit in streams.sent_units():
            said[number] = _native.crc32c(unit)
        sums = self._transport.all_gather(said).result().sum(0).tolist()
        for move, checksum in zip(wanted, sums, strict=True):
            if self._checksums.setdefault((layer, move.expert), checksum) != checksum:
                raise TransportError(f"slot {move.source} of MoE layer {layer} does not hold expert {move.expert}")
        for index, move in enumerate(streams.arriving):
            buffer = self._units.buffers[index, : streams.unit_bytes]
            if _native.crc32c(buffer) != sums[wanted.index(move)]:
                raise TransportError(f"expert {move.expert} of MoE layer {layer} arrived damaged")

    def _deliver(self, what: Arrived | None) -> None:
        """Say that something is there; the buffers are not touched until they are released."""
        with self._changed:
            self._ready.append(what)
            self._held = what is not None
            self._done += 1
            self._changed.wait_for(lambda: self._stopped or not self._held)


class Streams:
    """The experts of one layer that travel between each two ranks, as one stream of bytes a pair."""

    def __init__(self, wanted: Sequence[Move], transport: Transport, per_rank: int, memory: Bytes) -> None:
        self._rank, self._memory, self.unit_bytes = transport.rank, memory, memory.shape[1]
        self._first = transport.rank * per_rank
        pairs = [(move.source // per_rank, move.target // per_rank) for move in wanted]
        self._wanted, self._pairs = wanted, pairs
        self.arriving = [move for move, (_, target) in zip(wanted, pairs, strict=True) if target == self._rank]
        self._from = [source for source, target in pairs if target == self._rank]
        self.longest = self.unit_bytes * max(pairs.count(pair) for pair in pairs)

    def sent_units(self) -> list[tuple[int, Bytes]]:
        """Number of the move and memory of each expert that this rank sends."""
        found = enumerate(zip(self._wanted, self._pairs, strict=True))
        return [(n, self._memory[move.source - self._first]) for n, (move, (rank, _)) in found if rank == self._rank]

    def outgoing(self, rank: int, begin: int, end: int) -> Bytes:
        """Bytes [begin, end) of the stream to a rank."""
        units = [unit for number, unit in self.sent_units() if self._pairs[number][1] == rank]
        parts = []
        for index, unit in enumerate(units):
            at = index * self.unit_bytes
            parts.append(unit[max(begin - at, 0) : max(end - at, 0)])
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def incoming_bytes(self, rank: int, begin: int, end: int) -> int:
        """How many bytes of [begin, end) of the stream from a rank there are."""
        total = self._from.count(rank) * self.unit_bytes
        return max(0, min(end, total) - begin)

    def land(self, landed: Bytes, received: Sequence[int], begin: int, buffers: Bytes) -> None:
        """Put what a chunk brought, by source rank, into the buffers of its experts."""
        at = 0
        for rank, count in enumerate(received):
            chunk = landed[at : at + count]
            at += count
            mine = [index for index, source in enumerate(self._from) if source == rank]
            done = 0
            while done < count:
                unit, offset = divmod(begin + done, self.unit_bytes)
                size = min(count - done, self.unit_bytes - offset)
                buffers[mine[unit], offset : offset + size] = chunk[done : done + size]
                done += size
