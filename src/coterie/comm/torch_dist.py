"""TorchTransport: ranks that are processes, over torch.distributed's process groups ("gloo", or "nccl" by argument).

Numpy arrays in and out, as bytes, without copies for gloo. Groups are made directly over a store, without torch's
global default group, so that a process can hold several (control, serve, weights), replace one by its next generation
and never mixes their order. The store is hosted outside the ranks (`StoreHost`): any rank may die. Exchanges end within
the timeout; the error names the ranks that did not answer. Needs the extra [torch].
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.comm.roll_call import Roster
from coterie.comm.transport import (
    Aborted,
    CountMismatch,
    Counts,
    Int64,
    RankLost,
    TransportError,
    as_bytes,
    check_counts,
    result_array,
)

try:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import AllgatherOptions
except ImportError as error:  # pragma: no cover - the fast set has torch
    raise TransportError("several ranks need torch: pip install 'coterie[torch]'") from error

ROWS = "all_to_all_v"
WAKE_SECONDS = 0.1
"""How soon a waiting exchange notices `abort`."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the ranks meet."""

    host: str
    port: int


class StoreHost:
    """The meeting point, served by a thread of this process: the front end or launcher, never a rank."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises `TransportError` if the port is taken."""
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET)
        except OSError as error:
            raise TransportError(f"cannot host the ranks' store on {host}:{port}: {error.strerror}") from error
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.address = StoreAddress(host, port)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One rank's place in a group. Ranks of one (generation, purpose) meet; `timeout` in seconds.

    `interface`: the network interface to use; else the address by which the store is reached. `verify` exchanges the
    counts before every payload and raises `CountMismatch` instead of trusting the caller (one more round trip).
    `patience`: seconds that ranks may take to come to the meeting, where some load first; None takes the timeout.
    """

    rank: int
    size: int
    generation: int = 0
    purpose: Literal["control", "serve", "weights"] = "serve"
    timeout: float = 30.0
    backend: Literal["gloo", "nccl"] = "gloo"
    interface: str | None = None
    verify: bool = False
    patience: float | None = None


def never() -> bool:
    """Nobody gives a meeting up."""
    return False


def connect(address: StoreAddress, spec: GroupSpec, given_up: Callable[[], bool] = never) -> TorchTransport:
    """Join a group and wait for all its ranks. Raises `RankLost` naming those that did not come in time, `Aborted` as
    soon as `given_up` says that they need not meet any more."""
    if not 0 <= spec.rank < spec.size:
        raise TransportError(f"rank {spec.rank} of {spec.size} ranks")
    patience = timedelta(seconds=spec.timeout)
    try:
        store = dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=patience)
    except Exception as error:
        raise TransportError(f"cannot reach the ranks' store at {address.host}:{address.port}: {error}") from error
    inner = dist.PrefixStore(f"gen-{spec.generation}/{spec.purpose}", store)
    meeting = _Meeting(inner, _device_address(address, spec.interface), given_up)
    return TorchTransport(meeting, spec, spec.purpose)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where the ranks of a group meet, the address to listen on, and whether the meeting is off."""

    store: dist.Store
    host: str
    given_up: Callable[[], bool]

    def at(self, key: str) -> _Meeting:
        """A meeting of some of them."""
        return replace(self, store=dist.PrefixStore(key, self.store))


def _device_address(address: StoreAddress, interface: str | None) -> str:
    """The local IPv4 address to listen on."""
    if interface is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port))
            return str(probe.getsockname()[0])
    import psutil

    known = psutil.net_if_addrs()
    if interface not in known:
        raise TransportError(f"there is no network interface {interface!r}; there are {', '.join(sorted(known))}")
    for entry in known[interface]:
        if entry.family == socket.AF_INET:
            return entry.address
    raise TransportError(f"network interface {interface!r} has no IPv4 address")


class _TorchHandle:
    """A collective in flight: the tensors it uses stay referenced until its result is taken."""

    def __init__(self, transport: TorchTransport, kept: tuple[Any, ...], finish: Callable[[], Any], what: str) -> None:
        self._transport, self._kept, self._finish, self._what = transport, kept, finish, what
        self._number = transport.exchanges
        self.carries_rows = what == ROWS
        self.begun_ns, self.ended_ns = time.monotonic_ns(), 0
        if transport.stamp_ends:
            kept[0].get_future().add_done_callback(self._stamp)

    def _stamp(self, future: Any) -> None:
        """On a thread of the group, at the moment of completion."""
        self.ended_ns = time.monotonic_ns()

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        work = self._kept[0]
        assert work is not None, "a result is taken once"
        self._transport.wait(work, f"exchange {self._number} ({self._what})")
        self.ended_ns = self.ended_ns or time.monotonic_ns()

    def result(self) -> Any:
        self.wait()
        result = self._finish()
        self._kept = (None,)
        return result


class TorchTransport:
    """One rank of a process group. `exchanges` counts those entered; `numbers` are its ranks' numbers in the world.

    `stamp_ends`: handles note when an exchange was complete, not when somebody had waited for it (for traces; a call on
    the group's thread for each).
    """

    def __init__(self, meeting: _Meeting, spec: GroupSpec, name: str, numbers: tuple[int, ...] | None = None) -> None:
        self.rank, self.size, self.spec, self.name = spec.rank, spec.size, spec, name
        self.numbers = tuple(range(spec.size)) if numbers is None else numbers
        self.bytes_to: Int64 = np.zeros(spec.size, np.int64)
        self.exchanges = 0
        self.stamp_ends = self._waits = False
        self._meeting, self._timeout = meeting, spec.timeout
        self._aborted = threading.Event()
        self._children: list[TorchTransport] = []
        self._flying: set[Any] = set()
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._roster = Roster(meeting.store, spec.rank, spec.size)
        patience = spec.timeout if spec.patience is None else spec.patience
        missing = self._numbers(self._roster.meet(patience, meeting.given_up))
        if meeting.given_up():
            raise Aborted(f"{self._label()}: given up while its ranks met")
        if missing:
            raise RankLost(f"{self._label()}: {_ranks(missing)} did not join within {patience:g} s", missing)
        self._group: Any
        self._group, self._device = self._open_or_give_up()

    def _numbers(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.numbers[rank] for rank in ranks)

    def _label(self) -> str:
        return f"group {self.name}, generation {self.spec.generation}"

    def _open_or_give_up(self) -> tuple[Any, torch.device]:
        """Connect with the others on a thread: a rank that dies just now would hold this one up for the timeout."""
        opened: SimpleQueue[tuple[Any, torch.device] | TransportError] = SimpleQueue()

        def body() -> None:
            try:
                opened.put(self._open())
            except TransportError as error:
                opened.put(error)

        threading.Thread(target=body, name="coterie-connect", daemon=True).start()
        while True:
            try:
                result = opened.get(timeout=WAKE_SECONDS)
            except Empty:
                if self._meeting.given_up():
                    raise Aborted(f"{self._label()}: given up while its ranks connected") from None
                continue
            if isinstance(result, TransportError):
                raise result
            return result

    def _open(self) -> tuple[Any, torch.device]:
        limit = timedelta(seconds=self.spec.timeout)
        try:
            if self.spec.backend == "gloo":
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = limit
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._meeting.host)]
                group = dist.ProcessGroupGloo(self._meeting.store, self.rank, self.size, options)
                return group, torch.device("cpu")
            if not dist.is_nccl_available():
                raise TransportError("this torch has no NCCL; use gloo")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = limit
            device = torch.device("cuda", self.rank % torch.cuda.device_count())
            return dist.ProcessGroupNCCL(self._meeting.store, self.rank, self.size, nccl), device
        except RuntimeError as error:
            raise TransportError(f"{self._label()}: rank {self.rank} cannot connect: {error}") from error

    def _enter(self) -> tuple[Any, timedelta]:
        """The group and the time that an exchange may take."""
        group = self._group
        if group is None or self._aborted.is_set():
            raise Aborted(f"{self._label()} has ended; a new generation is needed")
        self.exchanges += 1
        return group, timedelta(seconds=self._timeout)

    def all_gather(self, values: Int64) -> _TorchHandle:
        options = AllgatherOptions()
        group, options.timeout = self._enter()
        values = np.ascontiguousarray(values, np.int64)
        out = np.empty((self.size, len(values)), np.int64)
        self.bytes_to += values.nbytes
        source, target = self._tensor(values), self._target(out.reshape(-1))
        work = group._allgather_base(target, source, options)
        return self._handle(work, source, target, out, "all_gather")

    def all_to_all_v(
        self, rows: NDArray[Any], sent: Counts, received: Counts, out: NDArray[Any] | None = None
    ) -> _TorchHandle:
        to, came = check_counts(self, rows, sent, received)
        if self.spec.verify:
            self._verify(to, came, rows)
        options = dist.AllToAllOptions()
        group, options.timeout = self._enter()
        result = result_array(rows, sum(came), out)
        data = as_bytes(rows)
        self.bytes_to += np.asarray(to, np.int64) * data.shape[1]
        source, target = self._tensor(data), self._target(as_bytes(result))
        work = group.alltoall_base(target, source, came, to, options)
        return self._handle(work, source, target, result, ROWS)

    def _verify(self, sent: list[int], received: list[int], rows: NDArray[Any]) -> None:
        width = as_bytes(rows).shape[1]
        table = self.all_gather(np.array([width, *sent], np.int64)).result()
        for source in range(self.size):
            if table[source, 0] != width or table[source, 1 + self.rank] != received[source]:
                raise CountMismatch(
                    f"{self._label()}: rank {source} sends {table[source, 1 + self.rank]} rows of {table[source, 0]} "
                    f"bytes to rank {self.rank}, which expects {received[source]} of {width}"
                )

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        if not array.flags.writeable:
            array = array.copy()
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _target(self, array: NDArray[Any]) -> torch.Tensor:
        target = torch.from_numpy(array)
        return target if self._device.type == "cpu" else torch.empty_like(target, device=self._device)

    def _handle(
        self, work: Any, source: torch.Tensor, target: torch.Tensor, out: NDArray[Any], what: str
    ) -> _TorchHandle:
        self._flying.add(work)

        def finish() -> NDArray[Any]:
            if self._device.type != "cpu":
                torch.from_numpy(out.view(np.uint8) if out.dtype != np.int64 else out.reshape(-1)).copy_(target)
            return out

        return _TorchHandle(self, (work, source, target), finish, what)

    @property
    def waiting(self) -> bool:
        return self._waits or any(child.waiting for child in self._children)

    def wait(self, work: Any, what: str) -> None:
        """Until the collective is done. Raises `Aborted`, or `RankLost` after a roll-call of the others."""
        self._waits = True
        try:
            self._wait(work, what)
        finally:
            self._waits = False

    def _wait(self, work: Any, what: str) -> None:
        deadline = time.monotonic() + self._timeout + 1.0
        while True:
            if self._aborted.is_set():
                raise Aborted(f"{self._label()}: aborted in {what}")
            try:
                work.wait(timedelta(seconds=WAKE_SECONDS))
                self._flying.discard(work)
                return
            except RuntimeError as error:
                if not work.is_completed():
                    if time.monotonic() < deadline:
                        continue
                    self._fail(what, error)
            try:
                work.wait()  # it may have completed just after that wait had ended
                self._flying.discard(work)
                return
            except RuntimeError as error:
                self._fail(what, error)

    def _fail(self, what: str, error: RuntimeError) -> None:
        timed_out = "timed out" in str(error).lower()
        cause = f"timed out after {self._timeout:g} s" if timed_out else "the connection was closed"
        missing = self._roster.call(what, self._aborted.is_set)
        self._let_go()
        if self._aborted.is_set():  # somebody knows already who is left
            raise Aborted(f"{self._label()}: aborted in {what}, in which {cause}") from error
        if missing is None:
            own = self.numbers[self.rank]
            raise RankLost(
                f"{self._label()}: {what}: {cause}, and rank {own} cannot reach the store: it is cut off", ()
            ) from error
        missing = self._numbers(missing)
        who = _ranks(missing) if missing else "no rank in particular (all have failed here)"
        raise RankLost(f"{self._label()}: {what}: {cause}; missing: {who}", missing) from error

    def subgroup(self, name: str, ranks: Sequence[int]) -> TorchTransport:
        members = tuple(ranks)
        spec = replace(self.spec, rank=members.index(self.rank), size=len(members), patience=self._timeout)
        self._made[name, members] += 1  # a second group of one name is another group
        key = f"{name}.{self._made[name, members]}/{'-'.join(map(str, members))}"
        child = TorchTransport(self._meeting.at(key), spec, f"{self.name}/{name}", self._numbers(members))
        self._children.append(child)
        return child

    def set_timeout(self, seconds: float) -> None:
        self._timeout = seconds
        for child in self._children:
            child.set_timeout(seconds)

    def abort(self) -> None:
        for child in self._children:
            child.abort()
        self._aborted.set()
        self._let_go()

    def _let_go(self) -> None:
        """End the group. Its destructor would wait for exchanges in flight, with the interpreter stopped, until their
        timeout if a rank is silent: a thread keeps the group until they have ended."""
        group, self._group = self._group, None
        if group is None:
            return
        group.abort()
        flying, patience = list(self._flying), timedelta(seconds=self._timeout + 1.0)

        def keep(held: Any) -> None:
            for work in flying:
                with contextlib.suppress(RuntimeError):
                    work.wait(patience)

        threading.Thread(target=keep, args=(group,), name="coterie-ended-group", daemon=True).start()


def _ranks(numbers: tuple[int, ...]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
