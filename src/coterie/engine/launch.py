"""Launch: the processes of several ranks, loaded together, compared, and made one engine.

Each rank loads its share of the experts and all of the rest; memory and cores are divided evenly. The ranks meet at a
store that this process hosts, as any rank may be lost. What differs between ranks is refused before they meet. All are
children of this process, or under torchrun (`remote`) the first is and the others come by themselves.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from coterie.engine.build import EngineInfo, Progress, open_model
from coterie.engine.config import NO_CLASSES, EngineConfig, ServiceConfig
from coterie.engine.fingerprint import check_alike
from coterie.engine.fleet import Fleet, FleetPlan
from coterie.engine.fleet_place import Place
from coterie.engine.memory import available_memory
from coterie.engine.process import Child, FromChild, Hello, StartedProcess, spawn, wait_ready
from coterie.engine.rank import Seat
from coterie.engine.rebalance import RebalancePolicy
from coterie.engine.remote import AWAY_SECONDS, FIND_SECONDS, FrontDoor, Join, World
from coterie.engine.resolve import check_config, memory_of_rank
from coterie.engine.wire import Wire
from coterie.engine.worker import Closed, Deliver, EngineLink
from coterie.kernels.machine import machine
from coterie.kernels.select import Choice
from coterie.model.shard import ExpertShard
from coterie.spec.errors import CoterieError
from coterie.spec.parallel import ONE_RANK, ParallelConfig

MOST_STALLS = 4
"""So many times a rank's longest stall an exchange may wait: it ends only what is no rank's fault, as a cut link."""
_log = logging.getLogger(__name__)

Opened = tuple[Wire[Any], Child]
"""A process that loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How an engine runs. `own_process`: one rank, not in this process. `world`: ranks that torchrun has started."""

    service: ServiceConfig = NO_CLASSES
    parallel: ParallelConfig = ONE_RANK
    world: World | None = None
    own_process: bool = False


ON_A_THREAD = RunSpec()
"""One rank on a thread of this process, without service classes."""


class Launch:
    """One start of several ranks: `load`, then `start`. `processes`: of the ranks as they were started."""

    def __init__(self, path: str | Path, config: EngineConfig, run: RunSpec) -> None:
        """Raises CoterieError for a layout that this model or installation cannot have; nothing is started."""
        parallel, world = run.parallel, run.world
        if importlib.util.find_spec("torch") is None:
            raise CoterieError(f"{parallel.num_ranks} ranks need torch: pip install 'coterie[torch]'")
        self._path, self._config, self._service, self._parallel = str(path), config, run.service, parallel
        self._world, self._door = world, None if world is None else FrontDoor(world, FromChild)
        self._files = open_model(path, strict=config.strict)
        check_config(self._files.spec, config)
        self._placement = parallel.placement(self._files.spec)
        self._local = local = parallel.num_ranks if world is None else world.local_size
        self._memory = memory_of_rank(self._files.spec, parallel.num_ranks, local, available_memory())
        if local > machine().threads:
            reason = "expect it to be slower than one rank, as they wait for each other in every layer"
            _log.warning("%d ranks share %d cores (%s): %s", local, machine().threads, machine().threads_reason, reason)
        self.processes: list[StartedProcess] = []

    def load(self, progress: Progress | None = None) -> EngineInfo:
        """Start all processes and wait until they are loaded. Raises CoterieError; then none is left."""
        from coterie.comm.torch_dist import StoreHost

        self._store = StoreHost() if self._world is None else StoreHost(self._world.host)
        ranks = self._parallel.num_ranks
        opens = [partial(self._open, rank, self._config, FIND_SECONDS) for rank in range(ranks)]
        self.processes = start_all(opens, progress)
        ready = [process.ready for process in self.processes]
        try:
            check_alike({rank: one.fingerprint for rank, one in enumerate(ready) if one.fingerprint is not None})
        except CoterieError:
            end_all([process.child for process in self.processes])
            raise
        self._length = min(one.max_model_len for one in ready)
        report = (*self._choices(), *(Choice(*line) for line in ready[0].report))
        lines = tuple(f"rank {rank}: {line}" for rank, one in enumerate(ready) for line in one.load_lines[:1])
        lines += tuple(ready[0].load_lines[1:])
        groups = ranks // self._parallel.tp
        return EngineInfo(self._files, self._config, self._length, report, lines, self._service, groups)

    def start(self, deliver: Deliver, closed: Closed) -> EngineLink:
        """Let the loaded ranks meet and serve. Raises CoterieError; then none is left."""
        nodes = self._placement.node_of_rank.tolist()
        places = [Place(rank, nodes[rank], process) for rank, process in enumerate(self.processes)]
        plan = FleetPlan(
            slots=self._placement.slot_to_expert,
            num_experts=self._placement.num_experts,
            page_size=self._config.page_size,
            token_budget=self._config.chunked_prefill_size,
            restart=self._restart if self._parallel.restart_ranks else None,
            tensor=self._parallel.tp,
            stall_seconds=self._parallel.stall_seconds,
        )
        fleet = Fleet(plan, places, deliver, closed)
        fleet.start()
        return fleet.link

    def _open(self, rank: int, config: EngineConfig, seconds: float) -> Opened:
        """A rank's process, told what to load: a child of this one, or one that comes by itself within some time."""
        if rank == 0 or self._door is None:
            return spawn(self._hello(rank, config))
        join, wire, child = self._door.take(rank, seconds)
        hello = self._hello(rank, config, join)
        wire.send(hello)
        return wire, child

    def _hello(self, rank: int, config: EngineConfig, join: Join | None = None) -> Hello:
        shard = ExpertShard.of(self._placement, self._files.spec, rank)
        address = self._store.address
        memory = min(self._memory, available_memory()) if self.processes else self._memory
        seat = Seat(
            number=rank,
            store_host=address.host,
            store_port=address.port,
            experts=dict(shard.experts),
            memory=0 if join is not None else memory,
            overlap=self._parallel.overlap,
            rebalance=RebalancePolicy(
                self._parallel.rebalance_steps, self._parallel.rebalance_moves, 1e6 * self._parallel.rebalance_rate
            ),
            tensor=self._parallel.tp,
            local_size=self._local if join is None else join.local_size,
            patience=MOST_STALLS * self._parallel.stall_seconds,
        )
        return Hello(self._path if join is None else join.model_path, config, self._service, seat)

    def _restart(self, rank: int) -> StartedProcess:
        """A lost rank once more, with the context that the others have."""
        config = replace(self._config, max_model_len=self._length)
        if self._parallel.tp > 1:  # the ranks of a group need caches of one size
            config = replace(config, kv_cache_tokens=self.processes[rank].ready.kv_cache_tokens)
        wire, child = self._open(rank, config, AWAY_SECONDS)
        process = wait_ready(wire, child)
        first, own = self.processes[0].ready.fingerprint, process.ready.fingerprint
        assert first is not None and own is not None
        try:  # files on disk may have changed meanwhile; options differ by the context, which is now asked for
            check_alike({0: first, rank or 1: msgspec.structs.replace(own, options=first.options)})
        except CoterieError:
            end_all([child])
            raise
        return process

    def _choices(self) -> tuple[Choice, ...]:
        parallel, placement = self._parallel, self._placement
        ranks = (
            Choice("ranks", str(parallel.num_ranks), f"on {parallel.nodes} node(s), each with its part of the cores"),
            Choice("tensor parallel", str(parallel.tp), f"{parallel.num_ranks // parallel.tp} group(s) share requests"),
        )
        if not placement.num_slots:
            return ranks
        copies = placement.num_slots - placement.num_experts
        spare = copies // placement.slots_per_rank // parallel.tp * parallel.tp
        survive = f"up to {spare} may be lost" if spare else "none may be lost: there are too few redundant experts"
        slots = Choice("expert slots", str(placement.num_slots), f"{placement.slots_per_rank} a rank; {survive}")
        return (*ranks, slots)


def start_all(opens: Sequence[Callable[[], Opened]], progress: Progress | None = None) -> list[StartedProcess]:
    """Start processes and wait until all are loaded. The first failure ends all, and is raised."""
    done: dict[int, tuple[int, int]] = {}
    opened: dict[int, Child] = {}
    results: dict[int, StartedProcess] = {}
    failures: list[tuple[int, Exception]] = []

    def start(index: int) -> None:
        def tell(now: int, total: int) -> None:
            done[index] = (now, total)
            if progress is not None and len(done) == len(opens):
                sizes = list(done.values())
                progress(sum(size for size, _ in sizes), sum(total for _, total in sizes))

        try:
            wire, opened[index] = opens[index]()
            results[index] = wait_ready(wire, opened[index], tell)
        except Exception as error:
            failures.append((index, error))
            for child in list(opened.values()):
                child.kill()

    threads = [threading.Thread(target=start, args=(index,), daemon=True) for index in range(len(opens))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        end_all(list(opened.values()))
        rank, error = failures[0]
        raise CoterieError(f"rank {rank}: {error}") from error
    return [results[index] for index in range(len(opens))]


def end_all(children: list[Child]) -> None:
    """Kill processes and wait for their end."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()
