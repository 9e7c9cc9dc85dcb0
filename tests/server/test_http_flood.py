"""Floods on the shipped model: a thousand at once give 200 or 429, never a 5xx; who obeys Retry-After finds room.

Each client opens a connection of its own. Memory is compared after a first flood, which fills pools and buffers.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import psutil
import pytest
from server_fakes import live

from coterie.engine.config import NO_CLASSES, EngineConfig, ServiceConfig
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import RunSpec

TEXT = "/v1/completions"
CLASSES = ServiceConfig(enabled=True, slo_seconds=(1.0, 2.0, 5.0), max_queued=(None, None, 900))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def ask(client: httpx.AsyncClient, index: int, *, obey: bool) -> list[tuple[int, str]]:
    """(status, Retry-After) of each visit, at most two."""
    body = {"prompt": f"{index} To be, or not to be, that is", "max_tokens": 2, "service_tier": "flex"}
    visits = []
    for _ in range(2 if obey else 1):
        response = await client.post(TEXT, json=body)
        visits.append((response.status_code, response.headers.get("retry-after", "")))
        if response.status_code == 429:
            assert response.json()["error"]["code"] == "queue_full" and int(visits[-1][1]) >= 1
            if obey and len(visits) == 1:
                await asyncio.sleep(int(visits[-1][1]))
                continue
        break
    return visits


def flood(url: str, count: int, *, obey: bool) -> list[list[tuple[int, str]]]:
    async def run() -> list[list[tuple[int, str]]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
            return await asyncio.gather(*(ask(client, i, obey=obey) for i in range(count)))

    return asyncio.run(run())


@pytest.mark.parametrize("service", [CLASSES, NO_CLASSES])
def test_a_thousand_at_once(service: ServiceConfig) -> None:
    config = EngineConfig(threads=1, max_running_requests=16, max_queued_requests=64, max_model_len=256)
    engine = AsyncEngine.launch(None, config, run=RunSpec(service=service))
    with live(engine) as server:
        flood(server.url, 300, obey=False)
        before = psutil.Process().memory_info().rss
        for _ in range(3):
            statuses = Counter(visits[-1][0] for visits in flood(server.url, 1000, obey=False))
            assert statuses.keys() <= {200, 429} and statuses[200] > 30, statuses
        grown = psutil.Process().memory_info().rss - before
        assert grown < 60e6, f"{grown / 1e6:.0f} MB more after three thousand requests"
        assert httpx.get(server.url + "/health").status_code == 200


def who_obeys(service: ServiceConfig) -> tuple[int, int]:
    """Visitors that came back when they were told to, and how many of them were served."""
    config = EngineConfig(threads=1, max_running_requests=16, max_queued_requests=64, max_model_len=256)
    engine = AsyncEngine.launch(None, config, run=RunSpec(service=service))
    with live(engine) as server:
        flood(server.url, 60, obey=False)
        visits = flood(server.url, 1000, obey=True)
        assert {status for one in visits for status, _ in one} <= {200, 429}
        back = [one for one in visits if len(one) == 2]
        return len(back), sum(one[1][0] == 200 for one in back)


@pytest.mark.parametrize("service", [CLASSES, NO_CLASSES])
def test_who_obeys_finds_room(service: ServiceConfig) -> None:
    """Most who come back when they were told to are served at once (69 to 98 % in floods on a noisy machine). What a
    visitor is told rests on the speed of late: a machine whose speed changes meanwhile is asked again.
    """
    seen = []
    for _ in range(3):
        seen.append(who_obeys(service))
        back, served = seen[-1]
        if back > 30 and served >= 2 / 3 * back:
            return
    pytest.fail(f"(came back, served): {seen}")
