"""Launch: the processes of several ranks on this machine, loaded together, compared, and made one engine.

Each rank loads its share of the experts and all of the rest; memory and cores are divided evenly. The ranks meet at a
store that this process hosts, as any rank may be lost. What differs between ranks is refused before they meet.
"""

from __future__ import annotations

import importlib.util
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import msgspec

from coterie.engine.build import EngineInfo, Progress, open_model
from coterie.engine.config import EngineConfig, ServiceConfig
from coterie.engine.fingerprint import check_alike
from coterie.engine.fleet import Fleet, FleetPlan, Place
from coterie.engine.memory import available_memory
from coterie.engine.process import Hello, StartedProcess, spawn, wait_ready
from coterie.engine.rank import Seat
from coterie.engine.rebalance import RebalancePolicy
from coterie.engine.resolve import check_config
from coterie.engine.worker import Closed, Deliver, EngineLink
from coterie.kernels.machine import machine
from coterie.kernels.select import Choice
from coterie.model.shard import ExpertShard
from coterie.spec.errors import CoterieError
from coterie.spec.parallel import ParallelConfig


class Launch:
    """One start of several ranks: `load`, then `start`. `processes`: of the ranks as they were started."""

    def __init__(
        self, path: str | Path, config: EngineConfig, service: ServiceConfig, parallel: ParallelConfig
    ) -> None:
        """Raises CoterieError for a layout that this model or installation cannot have; nothing is started."""
        if importlib.util.find_spec("torch") is None:
            raise CoterieError(f"{parallel.num_ranks} ranks need torch: pip install 'coterie[torch]'")
        self._path, self._config, self._service, self._parallel = str(path), config, service, parallel
        self._files = open_model(path, strict=config.strict)
        check_config(self._files.spec, config)
        self._placement = parallel.placement(self._files.spec)
        self.processes: list[StartedProcess] = []

    def load(self, progress: Progress | None = None) -> EngineInfo:
        """Start all processes and wait until they are loaded. Raises CoterieError; then none is left."""
        from coterie.comm.torch_dist import StoreHost

        self._store = StoreHost()
        ranks = self._parallel.num_ranks
        self._threads = self._config.threads or max(1, machine().threads // ranks)
        self._memory = available_memory() // ranks
        self.processes = start_all([self._hello(rank) for rank in range(ranks)], progress)
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
        )
        fleet = Fleet(plan, places, deliver, closed)
        fleet.start()
        return fleet.link

    def _hello(self, rank: int, config: EngineConfig | None = None, memory: int | None = None) -> Hello:
        shard = ExpertShard.of(self._placement, self._files.spec, rank)
        address = self._store.address
        seat = Seat(
            rank,
            address.host,
            address.port,
            dict(shard.experts),
            memory or self._memory,
            overlap=self._parallel.overlap,
            rebalance=RebalancePolicy(
                self._parallel.rebalance_steps, self._parallel.rebalance_moves, 1e6 * self._parallel.rebalance_rate
            ),
            tensor=self._parallel.tp,
        )
        return Hello(self._path, replace(config or self._config, threads=self._threads), self._service, seat)

    def _restart(self, rank: int) -> StartedProcess:
        """A lost rank once more, with the context that the others have."""
        config = replace(self._config, max_model_len=self._length)
        if self._parallel.tp > 1:  # the ranks of a group need caches of one size
            config = replace(config, kv_cache_tokens=self.processes[rank].ready.kv_cache_tokens)
        wire, child = spawn(self._hello(rank, config, min(self._memory, available_memory())))
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
        copies = placement.num_slots - placement.num_experts
        spare = copies // placement.slots_per_rank // parallel.tp * parallel.tp
        survive = f"up to {spare} may be lost" if spare else "none may be lost: there are too few redundant experts"
        return (
            Choice("ranks", str(parallel.num_ranks), f"on {parallel.nodes} node(s), {self._threads} thread(s) each"),
            Choice("tensor parallel", str(parallel.tp), f"{parallel.num_ranks // parallel.tp} group(s) share requests"),
            Choice("expert slots", str(placement.num_slots), f"{placement.slots_per_rank} a rank; {survive}"),
        )


def start_all(hellos: list[Hello], progress: Progress | None = None) -> list[StartedProcess]:
    """Start a process for each Hello and wait until all are loaded. The first failure ends all, and is raised."""
    started = [spawn(hello) for hello in hellos]
    done: dict[int, tuple[int, int]] = {}
    results: dict[int, StartedProcess | Exception] = {}

    def wait(index: int) -> None:
        def tell(now: int, total: int) -> None:
            done[index] = (now, total)
            if progress is not None and len(done) == len(hellos):
                sizes = list(done.values())
                progress(sum(size for size, _ in sizes), sum(total for _, total in sizes))

        try:
            results[index] = wait_ready(*started[index], tell)
        except Exception as error:
            results.setdefault(index, error)
            end_all([child for _, child in started])

    threads = [threading.Thread(target=wait, args=(index,), daemon=True) for index in range(len(hellos))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [(index, one) for index, one in results.items() if isinstance(one, Exception)]
    if failures:
        rank, error = failures[0]
        raise CoterieError(f"rank {rank}: {error}") from error
    return [one for _, one in sorted(results.items()) if isinstance(one, StartedProcess)]


def end_all(children: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes and wait for their end."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()
