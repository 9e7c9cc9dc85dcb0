"""Rebalancer: moves experts between ranks while they serve, a few per layer, so that load stays even.

After every `steps` steps with work the ranks gather what their tokens asked for since the last time and all compute the
same placement (`spec.balance`). A thread then exchanges the experts of one layer after the other over a group of its
own, in bounded chunks with a rate limit, into buffers that were allocated at the start, and checks them. The engine's
thread takes a layer over (weights into slots, the row of the placement) between two steps, when all ranks have said in
the control exchange before that step that they hold it. Until then, and if anything fails or gets stuck, the old
placement serves; all ranks give the attempt up after the same step and try again later, over a new group.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.comm.exchange import Exchange
from coterie.comm.transport import Aborted, Int64, Transport, TransportError
from coterie.kernels import _native
from coterie.kernels.api import Kernels
from coterie.kernels.native import NativeKernels
from coterie.observe.expert_load import ExpertLoad
from coterie.spec.balance import Room, balance, moves, place
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.placement import ExpertPlacement
from coterie.spec.split import split

Bytes = NDArray[np.uint8]
_log = logging.getLogger(__name__)

FAILED = -1
CHUNK = 64 * 1024
"""Bytes that a rank sends to each other rank at once."""
MOST_DOUBLINGS = 6
"""After each failure in a row the next attempt waits twice as many steps as before, up to so often."""


class RebalancePolicy(msgspec.Struct, frozen=True):
    """steps: between two decisions, 0 never; moves: at most, in each layer; rate: bytes a second that a rank sends;
    patience: seconds after which an exchange of a chunk, beyond the time that the rate gives it, is stuck."""

    steps: int = 0
    moves: int = 8
    rate: float = 32e6
    patience: float = 10.0

    def timeout(self, num_ranks: int) -> float:
        """Seconds that an exchange may take: a peer may wait for its rate before it sends."""
        return self.patience + num_ranks * CHUNK / self.rate


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

    A unit is all that belongs to an expert: codes, scales and minima of both its matrices. There is a buffer for each
    move that may happen at once, and for no more of them than a layer has slots here, whatever was asked for.
    """

    layers: Sequence[Bytes]
    buffers: Bytes

    @classmethod
    def of(cls, weights: Mapping[str, Any], spec: ModelSpec, kernels: Kernels, most_moves: int) -> Units:
        """Allocates and touches the buffers. Raises CoterieError for a backend that does not say where experts lie."""
        layers = _units(weights, spec, kernels)
        buffers = np.empty(_room(layers, most_moves), np.uint8)
        buffers.fill(0)
        return cls(layers, buffers)

    @staticmethod
    def buffer_bytes(weights: Mapping[str, Any], spec: ModelSpec, kernels: Kernels, most_moves: int) -> int:
        """What the buffers take, for the memory plan."""
        return math.prod(_room(_units(weights, spec, kernels), most_moves))


def _room(layers: Sequence[Bytes], most_moves: int) -> tuple[int, int]:
    """Shape of the buffers for so many moves; slots are as many on every rank, so all ranks move at most as many."""
    return min(most_moves, *(len(units) for units in layers)), max(units.shape[1] for units in layers)


def _units(weights: Mapping[str, Any], spec: ModelSpec, kernels: Kernels) -> list[Bytes]:
    if not isinstance(kernels, NativeKernels):
        raise CoterieError("experts can be moved while serving with the native backend only; use --rebalance-steps 0")
    return [kernels.units(weights[f"layers.{index}.ffn.gate_up"]) for index, _ in spec.moe_layers()]


Installed = Callable[[int, NDArray[np.int32]], None]
"""Told the MoE layer and the experts [slots of this rank] that it holds from now on."""


class Rebalancer:
    """One rank's part in one generation. `after_step` is the engine thread's; `stop` ends it for good."""

    def __init__(
        self,
        policy: RebalancePolicy,
        transport: Transport,
        exchange: Exchange,
        recorded: tuple[Units, ExpertLoad],
        installed: Installed = lambda layer, row: None,
    ) -> None:
        """`recorded`: the memory of this rank's experts, and what its tokens ask for."""
        self.policy, self.exchange, (self._units, self._load) = policy, exchange, recorded
        self._installed = installed
        self._mover = Mover(transport, self._units, policy)
        self._before = self._load.read()
        self._steps = self._applied = self._in_a_row = 0
        self._busy = False
        self.moved = self.cycles = self.failures = 0
        self.last_failure: str | None = None

    @property
    def progress(self) -> int:
        """What this rank says before a step: parts of the work that it has done, FAILED once it cannot go on."""
        return self._mover.progress

    @property
    def balancedness(self) -> dict[int, float]:
        """By MoE layer, of the last window, as its placement was: mean rows of the ranks over the busiest one's."""
        return dict(zip(self._load.layers, self._mover.balancedness, strict=False))

    def after_step(self, slowest: int) -> int:
        """At the end of a step with work; `slowest`: the least progress of all ranks before it. All ranks do alike.

        Returns how many experts this rank has taken over, FAILED when an attempt is given up.
        """
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
            self._busy, self._steps, self._in_a_row = False, 0, 0
            self.cycles += 1
            return
        memory, own = self._units.layers[arrived.layer], self.exchange.own_slots
        for index, slot in enumerate(arrived.slots):
            memory[slot - own.start] = self._units.buffers[index, : memory.shape[1]]
        self._mover.release()
        self.exchange.install_layer(arrived.layer, arrived.row)
        self.moved += len(arrived.slots)
        self._installed(arrived.layer, arrived.row[own.start : own.stop])

    def _give_up(self, reason: str) -> None:
        """The layers that were taken over stay so, on all ranks; the others stay as they are."""
        self._mover.give_up()
        self._busy, self._applied = False, 0
        self._in_a_row += 1
        wait = self.policy.steps << min(self._in_a_row - 1, MOST_DOUBLINGS)
        self._steps = self.policy.steps - wait
        self.failures += 1
        self.last_failure = reason
        _log.warning("experts stay where they are for %d steps: %s", wait, reason)


class Arrived(NamedTuple):
    """A layer whose new experts are in the buffers: this rank's slots for them, in order, and the whole new row."""

    layer: int
    slots: tuple[int, ...]
    row: NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Attempt:
    """Cycles over one group, until one fails. `done`: layers and ends of cycles delivered; `held`: the buffers are the
    taker's; `over`: it was given up. The group of the first attempt is the ranks' own, later ones are made when needed.
    """

    number: int = 0
    group: Transport | None = None
    ready: list[Arrived | None] = field(default_factory=list)
    done: int = 0
    held: bool = False
    over: bool = False
    error: str | None = None


class Mover:
    """The thread. A cycle is `begin`, then for every layer that changes one `take` and `release` once `progress` has
    grown, then one `take` that gives None. Between progress and release the buffers are the taker's. After FAILED the
    taker calls `give_up`, and may begin again: the thread comes to it when it has left the attempt before."""

    def __init__(self, transport: Transport, units: Units, policy: RebalancePolicy) -> None:
        self._transport, self._units, self._policy = transport, units, policy
        transport.set_timeout(policy.timeout(transport.size))
        self._changed = threading.Condition()
        self._asked: tuple[Attempt, Int64, ExpertPlacement] | None = None
        self._attempt = Attempt(group=transport)
        self._stopped = False
        self._not_before = 0.0
        self._checksums: dict[tuple[int, int], int] = {}
        self.balancedness: list[float] = []
        threading.Thread(target=self._run, name="coterie-moves", daemon=True).start()

    @property
    def progress(self) -> int:
        """Layers and ends of cycles delivered in this attempt, FAILED after an error."""
        return FAILED if self._attempt.error is not None else self._attempt.done

    @property
    def error(self) -> str | None:
        """What ended the present attempt."""
        return self._attempt.error

    def begin(self, window: Int64, placement: ExpertPlacement) -> None:
        """Decide on this rank's window of counts [L, E] and on those of the others, and move."""
        with self._changed:
            self._asked = self._attempt, window, placement
            self._changed.notify_all()

    def take(self) -> Arrived | None:
        """The oldest delivery."""
        with self._changed:
            return self._attempt.ready.pop(0)

    def release(self) -> None:
        """The delivery was copied; the buffers may be filled again."""
        with self._changed:
            self._attempt.held = False
            self._changed.notify_all()

    def give_up(self) -> None:
        """Forget the attempt; all ranks do so after the same step."""
        self._end(Attempt(self._attempt.number + 1))

    def stop(self) -> None:
        """End whatever the thread waits for, and the thread."""
        self._stopped = True
        self._end(Attempt(over=True))
        self._transport.abort()

    def _end(self, following: Attempt) -> None:
        with self._changed:
            before, self._attempt = self._attempt, following
            before.over, self._asked = True, None
            self._changed.notify_all()
        if before.group is not None:
            before.group.abort()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._asked is not None)
                if self._stopped or self._asked is None:
                    return
                (attempt, window, placement), self._asked = self._asked, None
            try:
                self._cycle(attempt, window, placement)
            except Exception as error:
                if not attempt.over:
                    attempt.error = f"moving experts failed: {type(error).__name__}: {error}"
                    if not isinstance(error, Aborted):  # which is the end of a generation
                        _log.warning("%s", attempt.error)  # at once: idle ranks take no step that would tell

    def _cycle(self, attempt: Attempt, window: Int64, before: ExpertPlacement) -> None:
        group = self._group(attempt)
        gathered: Int64 = group.all_gather(window.reshape(-1)).result()
        load = gathered.sum(0).reshape(window.shape)
        self.balancedness = balance(split(load, before), before.num_ranks).tolist()
        after = self._decide(load, before)
        for layer in np.flatnonzero(moves(before, after)).tolist():
            wanted = plan_moves(before, after, layer)
            streams = Streams(wanted, group, before.slots_per_rank, self._units.layers[layer])
            self._exchange(attempt, group, streams)
            self._check(group, layer, wanted, streams)
            slots = tuple(move.target for move in streams.arriving)
            self._deliver(attempt, Arrived(layer, slots, after.slot_to_expert[layer]))
            if attempt.over:
                return
        self._deliver(attempt, None)

    def _group(self, attempt: Attempt) -> Transport:
        """The group of an attempt. Raises TransportError if the others do not come to a new one."""
        if attempt.group is None:
            ranks = range(self._transport.size)
            group = self._transport.subgroup(f"attempt-{attempt.number}", ranks)
            group.set_timeout(self._policy.timeout(self._transport.size))
            with self._changed:
                attempt.group = group
            if attempt.over:
                group.abort()
        return attempt.group

    def _decide(self, load: Int64, before: ExpertPlacement) -> ExpertPlacement:
        sizes = tuple(np.bincount(before.node_of_rank).tolist())
        room = Room(num_slots=before.num_slots, num_ranks=before.num_ranks, num_nodes=sizes)
        return place(load, room, current=before, max_moves=len(self._units.buffers))

    def _exchange(self, attempt: Attempt, group: Transport, streams: Streams) -> None:
        """Send and receive one layer's experts, a chunk to each rank at a time."""
        ranks = range(group.size)
        for begin in range(0, streams.longest, CHUNK):
            parts = [streams.outgoing(rank, begin, begin + CHUNK) for rank in ranks]
            received = [streams.incoming_bytes(rank, begin, begin + CHUNK) for rank in ranks]
            self._wait_for_rate(attempt, sum(len(part) for part in parts))
            rows = np.concatenate(parts)
            landed = group.all_to_all_v(rows, [len(part) for part in parts], received).result()
            streams.land(landed, received, begin, self._units.buffers)

    def _wait_for_rate(self, attempt: Attempt, nbytes: int) -> None:
        now = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: attempt.over, max(0.0, self._not_before - now))
        self._not_before = max(now, self._not_before) + nbytes / self._policy.rate

    def _check(self, group: Transport, layer: int, wanted: Sequence[Move], streams: Streams) -> None:
        """What arrived is what was sent, and what every copy of the expert has been so far."""
        said = np.zeros(len(wanted), np.int64)
        for number, unit in streams.sent_units():
            said[number] = _native.crc32c(unit)
        sums = group.all_gather(said).result().sum(0).tolist()
        for move, checksum in zip(wanted, sums, strict=True):
            if self._checksums.setdefault((layer, move.expert), checksum) != checksum:
                raise TransportError(f"slot {move.source} of MoE layer {layer} does not hold expert {move.expert}")
        for index, move in enumerate(streams.arriving):
            buffer = self._units.buffers[index, : streams.unit_bytes]
            if _native.crc32c(buffer) != sums[wanted.index(move)]:
                raise TransportError(f"expert {move.expert} of MoE layer {layer} arrived damaged")

    def _deliver(self, attempt: Attempt, what: Arrived | None) -> None:
        """Say that something is there; the buffers are not touched until they are released."""
        with self._changed:
            attempt.ready.append(what)
            attempt.held = what is not None
            attempt.done += 1
            self._changed.wait_for(lambda: attempt.over or not attempt.held)


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
