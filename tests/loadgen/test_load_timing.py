"""What the load client reports is what happened: against a server whose timetable is known and whose sends are kept."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest
from timed_server import TimedServer, raw, timetable, whole

from coterie.loadgen.client import CHAT, Client, Prompt, Record
from coterie.loadgen.connection import Address
from coterie.loadgen.report import Wanted, make_report
from coterie.loadgen.run import Arrivals, Load, run_load

SLACK = 0.05
"""Seconds that a busy machine may add between the server's write and the client's read."""


def load_on(server: TimedServer, count: int, arrivals: Arrivals | None = None, **client: object) -> Load:
    prompts = [Prompt("to be", 4)] * count
    made = Client(Address.parse(server.url), model="timed", **client)  # type: ignore[arg-type]
    return asyncio.run(run_load(made, prompts, arrivals or Arrivals()))


def test_reported_times_are_those_of_the_server() -> None:
    gaps = [0.15, 0.03, 0.03, 0.2, 0.03]
    with TimedServer(timetable(gaps, prompt=11, tokens=9)) as server:
        load = load_on(server, 3)
    assert [record.error for record in load.records] == [None] * 3
    for record, seen in zip(sorted(load.records, key=lambda r: r.sent), server.seen, strict=True):
        assert len(record.news) == len(gaps)
        for got, sent in zip(record.news, seen.sent, strict=True):
            assert 0 <= got - sent < SLACK
        assert record.ttft is not None and record.tpot is not None
        assert record.ttft == pytest.approx(seen.sent[0] - seen.came, abs=SLACK)
        # Nine tokens came in five pieces: time a token is over the tokens, gaps are over the pieces.
        assert record.tpot == pytest.approx((seen.sent[-1] - seen.sent[0]) / 8, abs=SLACK / 8)
        assert record.gaps == pytest.approx([b - a for a, b in zip(seen.sent, seen.sent[1:], strict=False)], abs=SLACK)
        assert (record.prompt_tokens, record.output_tokens, record.text) == (11, 9, "w0 w1 w2 w3 w4 ")
    report = make_report(load, Wanted(("ttft", "tpot", "itl", "e2el"), (50.0, 100.0), (("ttft", 1e4), ("e2el", 1.0))))
    assert report["median_ttft_ms"] == pytest.approx(150, abs=1e3 * SLACK)
    assert report["median_itl_ms"] == pytest.approx(30, abs=1e3 * SLACK)
    assert report["p100_itl_ms"] == report["worst_gap_ms"] == pytest.approx(200, abs=1e3 * SLACK)
    assert report["median_e2el_ms"] == pytest.approx(440, abs=2e3 * SLACK)
    assert report["mean_tpot_ms"] == pytest.approx(290 / 8, abs=1e3 * SLACK / 4)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (33, 27)
    assert report["output_throughput"] == pytest.approx(27 / report["duration"])
    assert 0.43 < report["duration"] < 0.44 + 4 * SLACK
    assert (report["good_requests"], report["request_goodput"]) == (0, 0.0)  # no answer is whole in a millisecond


def test_open_loop_arrivals_do_not_wait_for_answers() -> None:
    arrivals = Arrivals(rate=40.0, seed=3)
    with TimedServer(timetable([0.8])) as server:
        load = load_on(server, 12, arrivals)
    came = sorted(seen.came for seen in server.seen)
    due = arrivals.times(12)
    assert due[-1] < 0.7, "this seed's arrivals end before the first answer"
    assert [when - load.started for when in came] == pytest.approx(due, abs=SLACK)
    assert server.connections == 12
    assert make_report(load, Wanted())["max_concurrent_requests"] == 12


def test_closed_loop_keeps_its_bound_and_its_connections() -> None:
    with TimedServer(timetable([0.05, 0.05])) as server:
        load = load_on(server, 9, Arrivals(max_concurrency=3))
    report = make_report(load, Wanted())
    assert (report["completed"], report["max_concurrent_requests"], server.connections) == (9, 3, 3)
    assert report["duration"] == pytest.approx(0.3, abs=4 * SLACK)


def test_arrivals_have_their_rate_and_seed() -> None:
    for burstiness in (0.3, 1.0, 10.0):
        times = Arrivals(rate=5.0, burstiness=burstiness, seed=1).times(4000)
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        mean = sum(gaps) / len(gaps)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
        assert mean == pytest.approx(0.2, rel=0.1)
        assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert Arrivals(rate=5.0, seed=1).times(9) == Arrivals(rate=5.0, seed=1).times(9)
    assert Arrivals(rate=5.0, seed=2).times(9) != Arrivals(rate=5.0, seed=1).times(9)
    assert Arrivals().times(3) == [0.0] * 3


FULL = b'{"error": {"message": "the queue is full", "type": "rate_limit_error"}}'
CUT = b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n'
FAILED = CUT + b'data: {"error": {"message": "the engine stopped"}}\n\n'


@pytest.mark.parametrize(
    ("behaviour", "kind", "said"),
    [
        (whole("429 Too Many", FULL), "HTTP 429", "the queue is full"),
        (whole("200 OK", b"{}"), "no stream", "text/event-stream"),
        (raw(CUT), "cut", r"without \[DONE\]"),
        (raw(FAILED), "error event", "the engine stopped"),
        (raw(CUT + b"data: {]\n\n"), "bad event", "data|malformed"),
        (raw(b"220 smtp ready\r\n\r\n"), "no HTTP", "does not begin like HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "no HTTP", "no length"),
        (raw(b""), "cut", "closed the connection"),
        (timetable([5.0]), "timeout", "no end after 0.3 s"),
    ],
)
def test_failures_are_counted_by_kind_and_cost_the_others_nothing(behaviour, kind, said) -> None:
    with TimedServer(behaviour, timetable([0.0, 0.0])) as server:
        load = load_on(server, 3, Arrivals(max_concurrency=1, timeout=0.3))
    report = make_report(load, Wanted(goals=(("ttft", 1e4),)))
    assert (report["completed"], report["failed"], report["errors_by_kind"]) == (2, 1, {kind: 1})
    assert report["good_requests"] == 2
    assert report["total_output_tokens"] == 4
    assert re.search(said, report["error_examples"][kind]), report["error_examples"]


def test_nobody_listens() -> None:
    with TimedServer(timetable([0.0])) as server:
        pass
    load = load_on(server, 2)
    assert make_report(load, Wanted())["errors_by_kind"] == {"no connection": 2}


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    async def answer_and_close(server, seen, writer):
        await timetable([0.0])(server, seen, writer)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()

    async def two(url: str) -> Load:
        client = Client(Address.parse(url))
        for _ in range(2):
            load = Load(1)
            record = Record(0, 0.0)
            await client.stream(Prompt("a", 1), record)
            load.records.append(record)
            assert record.error is None
            await asyncio.sleep(0.1)
        return load

    with TimedServer(answer_and_close) as server:
        asyncio.run(two(server.url))
    assert server.connections == 2


def test_an_answer_without_usage_counts_its_news_and_says_so() -> None:
    with TimedServer(timetable([0.0] * 3, counted=False)) as server:
        report = make_report(load_on(server, 2), Wanted())
    assert (report["total_output_tokens"], report["answers_without_usage"]) == (6, 2)


def test_stopping_keeps_what_is_done() -> None:
    async def run(url: str) -> Load:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.5, stop.set)
        client = Client(Address.parse(url))
        return await run_load(client, [Prompt("a", 2)] * 50, Arrivals(rate=50.0), stop=stop)

    with TimedServer(timetable([0.0, 0.05]), timetable([0.0, 60.0])) as server:
        load = asyncio.run(run(server.url))
    report = make_report(load, Wanted())
    assert load.interrupted and report["interrupted"]
    assert (report["completed"], report["failed"]) == (1, 0)
    assert report["unfinished"] == len(load.records) - 1 > 3
    assert len(load.records) < 50
    assert report["duration"] < 2


def test_what_is_sent() -> None:
    with TimedServer(timetable([0.0])) as server:
        extra = {"ignore_eos": True}
        client = Client(Address.parse(server.url + "/v1/"), api_key="k", headers={"X-A": "b"}, endpoint=CHAT,
                        model="timed", extra=extra)  # fmt: skip
        asyncio.run(run_load(client, [Prompt("hello", 4)], Arrivals()))
    (seen,) = server.seen
    assert seen.path == CHAT
    assert (seen.headers["authorization"], seen.headers["x-a"]) == ("Bearer k", "b")
    assert seen.body == {
        "model": "timed", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


def test_pieces_of_an_event_and_several_in_one_piece() -> None:
    """Events are cut anywhere by the network, also inside a multi-byte character and a line end."""
    stream = b"".join(
        b"data: %b\r\n\r\n" % json.dumps({"choices": [{"text": piece}]}, ensure_ascii=False).encode() for piece in "aäπ"
    )
    stream = b": ping\n\n" + stream + b"data: [DONE]\n\n"

    async def dribble(server, seen, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(stream), 7):
            part = stream[start : start + 7]
            writer.write(b"%x;note=1\r\n%b\r" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(b"\n")
        writer.write(b"0\r\nTrailer: x\r\n\r\n")

    with TimedServer(dribble) as server:
        load = load_on(server, 2, Arrivals(max_concurrency=1))
    assert [(record.text, record.error) for record in load.records] == [("aäπ", None)] * 2
    assert server.connections == 1
