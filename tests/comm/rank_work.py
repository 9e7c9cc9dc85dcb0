"""What the rank processes of these tests do. In a module of its own, so that the processes import no test."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.comm import torch_dist
from coterie.comm.torch_dist import GroupSpec, StoreAddress, connect
from coterie.comm.transport import Aborted, CountMismatch, RankLost, Transport, check_agreement

TYPES = ("float32", "uint16", "int8", "int64", "uint8", "bool")


def sizes(size: int) -> np.ndarray:
    """Rows from each rank to each: uneven, some zero; rank 1 sends none, the last receives only its own."""
    table = np.arange(size * size).reshape(size, size) * 7 % 5
    table[min(1, size - 1)] = 0
    table[: size - 1, size - 1] = 0
    return table


def rows_of(source: int, target: int, count: int, dtype: str, width: int = 3) -> np.ndarray:
    """What `source` sends to `target`: each value says where it came from."""
    values = source * 40 + target * 9 + np.arange(count * width)
    return (values % 2 if dtype == "bool" else values % 100).astype(dtype).reshape(count, width)


def exchange_everything(transport: Transport, dtype: str) -> None:
    """One uneven all_to_all_v, checked on the receiver."""
    size, rank = transport.size, transport.rank
    table = sizes(size)
    rows = np.concatenate([rows_of(rank, to, table[rank, to], dtype) for to in range(size)])
    out = np.empty((int(table[:, rank].sum()), 3), dtype)
    got = transport.all_to_all_v(rows, table[rank], table[:, rank], out).result()
    want = np.concatenate([rows_of(source, rank, table[source, rank], dtype) for source in range(size)])
    assert got is out and got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def join(address: StoreAddress, rank: int, size: int, **options: Any) -> Transport:
    return connect(address, replace(GroupSpec(rank, size, timeout=10.0), **options))


def collectives(address: StoreAddress, rank: int, size: int) -> list[list[int]]:
    transport = join(address, rank, size, verify=False)
    check_agreement(transport, "version", "1.0")
    for dtype in TYPES:
        exchange_everything(transport, dtype)
    handles = [transport.all_gather(np.array([rank, round_], np.int64)) for round_ in range(8)]
    for round_, handle in reversed(list(enumerate(handles))):
        np.testing.assert_array_equal(handle.result(), [[source, round_] for source in range(size)])
    nothing = transport.all_to_all_v(np.zeros((0, 4), np.float32), [0] * size, [0] * size).result()
    assert nothing.shape == (0, 4)
    assert transport.bytes_to[rank] >= 64
    return transport.all_gather(np.array([rank * 10, 1], np.int64)).result().tolist()


def groups(address: StoreAddress, rank: int, size: int) -> tuple[list[int], list[int], list[int]]:
    """Groups by purpose and generation do not meet; sub-groups are numbered in the order given."""
    serve, control = join(address, rank, size), join(address, rank, size, purpose="control")
    later = join(address, rank, size, generation=1)
    first = serve.all_gather(np.array([rank], np.int64))
    second = control.all_gather(np.array([100 + rank], np.int64))
    third = later.all_gather(np.array([200 + rank], np.int64))
    results = [handle.result()[:, 0].tolist() for handle in (third, second, first)]
    assert results == [[base + source for source in range(size)] for base in (200, 100, 0)]
    half = [source for source in range(size) if source % 2 == rank % 2]
    inner = serve.subgroup("parity", half)
    assert (inner.rank, inner.size) == (half.index(rank), len(half))
    exchange_everything(inner, "float32")
    return inner.all_gather(np.array([rank], np.int64)).result()[:, 0].tolist(), half, serve.bytes_to.tolist()


def wrong_counts(address: StoreAddress, rank: int, size: int) -> str:
    transport = join(address, rank, size, verify=True)
    sent = [2] * size
    received = [3 if rank == 0 and source == size - 1 else 2 for source in range(size)]
    try:
        transport.all_to_all_v(np.zeros((2 * size, 4), np.float32), sent, received)
    except CountMismatch as error:
        return str(error)
    return ""


def disagree(address: StoreAddress, rank: int, size: int) -> None:
    check_agreement(join(address, rank, size), "the model", f"model-{rank // 2}")


def lose_one(address: StoreAddress, rank: int, size: int, fault: str) -> tuple[tuple[int, ...], str, float]:
    """The last rank ends, or never enters. Returns what the others learn, and how long it took."""
    transport = join(address, rank, size)
    exchange_everything(transport, "uint8")
    transport.set_timeout(0.5)
    if rank == size - 1:
        if fault == "kill":
            os._exit(9)
        time.sleep(60)
    start = time.monotonic()
    try:
        exchange_everything(transport, "uint8")
    except RankLost as error:
        spent = time.monotonic() - start
        try:
            transport.all_gather(np.zeros(1, np.int64))
        except Aborted:
            return error.missing, str(error), spent
    raise AssertionError("the exchange succeeded, or a broken group could be used")


def survive(address: StoreAddress, rank: int, size: int) -> list[int]:
    """Rank 0 dies; the others make the next generation without it."""
    transport = join(address, rank, size)
    if rank == 0:
        os._exit(9)
    try:
        transport.all_gather(np.zeros(1, np.int64)).result()
    except RankLost as error:
        assert error.missing == (0,), error
    transport.abort()
    again = join(address, rank - 1, size - 1, generation=1)
    exchange_everything(again, "float32")
    return again.all_gather(np.array([rank], np.int64)).result()[:, 0].tolist()


def slow_peer(address: StoreAddress, rank: int, size: int, seconds: float) -> float:
    """A late rank is waited for, within the timeout."""
    transport = join(address, rank, size)
    if rank == size - 1:
        time.sleep(seconds)
    start = time.monotonic()
    exchange_everything(transport, "float32")
    return time.monotonic() - start


def abort_a_wait(address: StoreAddress, rank: int, size: int) -> float:
    transport = join(address, rank, size)
    if rank == 0:
        time.sleep(2)
        return 0.0
    threading.Timer(0.3, transport.abort).start()
    start = time.monotonic()
    try:
        transport.all_gather(np.zeros(1, np.int64)).result()
    except Aborted:
        return time.monotonic() - start
    raise AssertionError("nothing aborted it")


def late(address: StoreAddress, rank: int, size: int) -> None:
    if rank == 0:
        time.sleep(60)
    join(address, rank, size, timeout=0.5)


def wake_often(address: StoreAddress, rank: int, size: int) -> int:
    """Waits that end and begin again while exchanges complete: none may be taken for a failure."""
    torch_dist.WAKE_SECONDS = 1e-3
    transport = join(address, rank, size)
    rows, counts = np.zeros((1 << 20, 1), np.uint8), np.full(size, 1 << 19)
    for _ in range(250):
        transport.all_gather(np.zeros(1, np.int64)).result()
        transport.all_to_all_v(rows, counts, counts).result()
    return transport.exchanges


def end_with_exchanges_in_flight(address: StoreAddress, rank: int, size: int) -> float:
    """Each rank has entered a pair that its neighbour has not; a lost rank ends all, and nobody waits to clean up."""
    transport = join(address, rank, size, timeout=20.0)
    pairs = {}
    for first in range(size - 1):
        pair = (first, (first + 1) % (size - 1))
        if rank in pair:
            pairs[first] = transport.subgroup("pair", pair)
    transport.all_gather(np.zeros(1, np.int64)).result()
    if rank == size - 1:
        os._exit(9)
    held = [pairs[rank].all_gather(np.zeros(1, np.int64))]
    start = time.monotonic()
    try:
        transport.all_gather(np.zeros(1, np.int64)).result()
    except RankLost:
        transport.abort()
    held.clear()
    pairs.clear()
    del transport
    return time.monotonic() - start


def meet_late(address: StoreAddress, rank: int, size: int) -> tuple[bool, bool, list[int]]:
    """Rank 1 comes to an exchange and to the meeting of a part later than a meeting's own timeout."""
    asked: list[float] = []

    def given_up() -> bool:
        asked.append(time.monotonic())
        return False

    transport = connect(address, GroupSpec(rank, size, timeout=1.0, patience=10.0), given_up)
    transport.set_timeout(10.0)
    seen: list[bool] = []
    watch = threading.Thread(target=lambda: (time.sleep(0.7), seen.append(transport.waiting)))
    watch.start()
    time.sleep(1.5 * rank)
    transport.all_gather(np.array([rank], np.int64)).result()
    watch.join()
    began = time.monotonic()
    time.sleep(1.5 * rank)
    part = transport.subgroup("part", range(size))
    polled = [moment for moment in asked if began < moment < began + 1.4]
    return seen[0], len(polled) > 5, part.all_gather(np.array([rank], np.int64)).result()[:, 0].tolist()
