"""TorchTransport on gloo: real processes on loopback, faults included."""

from __future__ import annotations

import socket
import time

import pytest

pytest.importorskip("torch")

import rank_work
from rank_processes import outcomes_of_ranks, run_ranks

from coterie.comm.torch_dist import GroupSpec, StoreAddress, StoreHost, connect
from coterie.comm.transport import Aborted, TransportError


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives(size: int) -> None:
    assert run_ranks(size, rank_work.collectives) == [[[rank * 10, 1] for rank in range(size)]] * size


def test_groups_of_purposes_generations_and_parts() -> None:
    for gathered, half, sent in run_ranks(4, rank_work.groups):
        assert gathered == half
        assert len(sent) == 4 and min(sent) == 8


def test_wrong_counts_are_refused_before_the_payload() -> None:
    messages = run_ranks(2, rank_work.wrong_counts)
    assert "rank 1 sends 2 rows of 16 bytes to rank 0, which expects 3" in messages[0]


def test_ranks_that_differ_are_named() -> None:
    for succeeded, text in outcomes_of_ranks(3, rank_work.disagree):
        assert not succeeded and "ranks differ in the model: rank 2 from rank 0" in text


def test_a_rank_that_loads_first_is_waited_for_as_long_as_in_an_exchange() -> None:
    """And who waits says so, from another thread's view; who loads does not."""
    waited, loaded = run_ranks(2, rank_work.meet_late)
    assert waited == (True, True, [0, 1]) and loaded == (False, False, [0, 1])


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_the_missing_rank_is_named(fault: str) -> None:
    outcomes = run_ranks(3, rank_work.lose_one, fault, missing=(2,))
    for missing, text, seconds in outcomes[:2]:
        assert missing == (2,) and "missing: rank 2" in text and "all_to_all_v" in text
        assert seconds < 8
        assert ("timed out after 0.5 s" in text) == (fault == "hang")


def test_survivors_of_rank_zero_go_on_in_the_next_generation() -> None:
    assert run_ranks(3, rank_work.survive, missing=(0,)) == [None, [1, 2], [1, 2]]


@pytest.mark.parametrize("late", [0.5, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_slow_peer_is_waited_for(late: float) -> None:
    seconds = run_ranks(2, rank_work.slow_peer, late)
    assert seconds[0] > late * 0.6


def test_an_exchange_that_completes_as_a_wait_ends_is_no_failure() -> None:
    assert run_ranks(2, rank_work.wake_often) == [500, 500]


def test_abort_ends_a_wait() -> None:
    assert 0.1 < run_ranks(2, rank_work.abort_a_wait)[1] < 1.5


def test_nobody_waits_for_exchanges_in_flight_when_a_group_ends() -> None:
    seconds = run_ranks(4, rank_work.end_with_exchanges_in_flight, missing=(3,))
    assert all(spent < 8 for spent in seconds[:3]), seconds


def test_a_rank_that_never_joins_is_named() -> None:
    outcomes = outcomes_of_ranks(2, rank_work.late, missing=(0,))
    assert outcomes[1] is not None
    succeeded, text = outcomes[1]
    assert not succeeded and text.startswith("RankLost") and "rank 0 did not join within 0.5 s" in text


def test_a_meeting_that_is_given_up_ends_at_once() -> None:
    host, began = StoreHost(), time.monotonic()
    with pytest.raises(Aborted, match="given up while its ranks met"):
        connect(host.address, GroupSpec(0, 2, timeout=30.0), lambda: time.monotonic() - began > 0.2)
    assert time.monotonic() - began < 10.0


def test_a_port_in_use_and_an_unknown_interface() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError, match="cannot host"):
        StoreHost(port=taken.getsockname()[1])
    host = StoreHost()
    with pytest.raises(TransportError, match=r"no network interface 'cable7'; there are .*lo"):
        connect(host.address, GroupSpec(0, 1, interface="cable7"))
    with pytest.raises(TransportError, match="rank 3 of 2"):
        connect(host.address, GroupSpec(3, 2))
    alone = connect(host.address, GroupSpec(0, 1, interface="lo"))
    assert alone.size == 1


def test_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(TransportError, match="cannot reach the ranks' store"):
        connect(StoreAddress("127.0.0.1", port), GroupSpec(0, 2, timeout=0.5))
