"""What payloads carried beside what the links could have, in bytes and moments that are given."""

from __future__ import annotations

import pytest

from coterie.comm.link_use import LinkUse


def test_bytes_and_what_the_link_could_carry_meanwhile() -> None:
    links = LinkUse()
    links.rates = [1000.0, 100.0]
    links.carried((300, 0), 0, 10**9)
    links.carried((0, 50), 0, 10**9)
    found = links.by_class()
    assert found["inside a node"] == (300, pytest.approx(1000)) and found["between nodes"] == (50, pytest.approx(100))


def test_payloads_that_are_under_way_together_share_the_time() -> None:
    links = LinkUse()
    links.rates = [0.0, 100.0]
    for begun, ended in ((0, 4), (1, 3), (2, 6), (8, 9)):  # seconds 0 to 6 and 8 to 9
        links.carried((0, 10), begun * 10**9, ended * 10**9)
    assert links.by_class() == {"between nodes": (40, pytest.approx(700))}


def test_nothing_is_said_of_what_was_not_used_or_not_probed() -> None:
    links = LinkUse()
    assert links.by_class() == {}
    links.carried((7, 0), 5, 6)
    assert links.by_class() == {"inside a node": (7, 0.0)}
