"""LocalTransport: the same exchanges in one process, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.comm.local import LocalTransport
from coterie.comm.transport import Aborted, CountMismatch, TransportError, check_agreement


def test_rows_arrive_by_source() -> None:
    ranks = LocalTransport.group(3)
    table = np.array([[1, 0, 2], [0, 0, 0], [3, 1, 0]])
    rows = [np.concatenate([np.full((n, 2), 10 * r + to, np.uint8) for to, n in enumerate(table[r])]) for r in range(3)]
    handles = [rank.all_to_all_v(rows[rank.rank], table[rank.rank], table[:, rank.rank]) for rank in ranks[:2]]
    assert not handles[0].ready()
    handles.append(ranks[2].all_to_all_v(rows[2], table[2], table[:, 2]))
    rows[2][:] = 99  # a sender may reuse its buffer
    assert [handle.result()[:, 0].tolist() for handle in handles] == [[0, 20, 20, 20], [21], [2, 2]]
    assert ranks[2].bytes_to.tolist() == [6, 2, 0]
    with pytest.raises(AssertionError, match="taken once"):
        handles[0].result()


def test_gather_and_groups() -> None:
    ranks = LocalTransport.group(4)
    handles = [rank.all_gather(np.array([rank.rank, 5])) for rank in ranks]
    assert handles[3].result().tolist() == [[0, 5], [1, 5], [2, 5], [3, 5]]
    pair = [ranks[3].subgroup("odd", (3, 1)), ranks[1].subgroup("odd", (3, 1))]
    assert [rank.rank for rank in pair] == [0, 1]
    handles = [rank.all_gather(np.array([rank.rank])) for rank in pair]
    assert handles[0].result().tolist() == [[0], [1]]


def test_what_is_refused() -> None:
    first, second = LocalTransport.group(2)
    rows = np.zeros((2, 4), np.float32)
    with pytest.raises(CountMismatch, match="sum to 3"):
        first.all_to_all_v(rows, [1, 2], [1, 1])
    with pytest.raises(CountMismatch, match="sends itself 1 rows and expects 2"):
        first.all_to_all_v(rows, [1, 1], [2, 1])
    with pytest.raises(CountMismatch, match="3 counts to send"):
        first.all_to_all_v(rows, [1, 1, 0], [1, 1])
    handle = first.all_to_all_v(rows, [1, 1], [1, 1])
    second.all_to_all_v(rows, [0, 2], [1, 2])
    with pytest.raises(CountMismatch, match="rank 1 sends 0 rows to rank 0, which expects 1"):
        handle.result()
    handle = first.all_to_all_v(rows, [1, 1], [1, 1])
    second.all_gather(np.zeros(1))
    with pytest.raises(TransportError, match="different ways"):
        handle.result()
    with pytest.raises(ValueError, match="not a contiguous float32"):
        LocalTransport().all_to_all_v(rows, [2], [2], np.empty((3, 4), np.float32)).result()


def test_abort_ends_all() -> None:
    first, second = LocalTransport.group(2)
    handle = first.all_gather(np.zeros(1))
    second.abort()
    assert handle.ready()
    with pytest.raises(Aborted):
        handle.result()
    with pytest.raises(Aborted):
        first.all_gather(np.zeros(1))


def test_agreement_of_one() -> None:
    check_agreement(LocalTransport(), "version", "1")
