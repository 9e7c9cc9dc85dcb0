"""The server on the real engine with a tiny model: counters that add up (L1), hang-ups (F2), limits (F1), one text."""

from __future__ import annotations

import itertools
import json
import socket
import threading

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import BOS, Live, events, eventually, tiny_folder

from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.server.metrics import CORE

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        load_format="dummy", max_model_len=256, max_running_requests=4, max_queued_requests=8, chunked_prefill_size=32,
        page_size=16, kv_cache_tokens=1024, threads=1,
    )  # fmt: skip

    def launch(observer):
        engine = AsyncEngine.launch(str(folder), config, "tiny")
        engine.observer = observer
        return engine

    running = Live(launch, metrics_compat="vllm", max_choices=16)
    running.start()
    assert running.ready.wait(60), running.error
    yield running
    running.stop()
    running.join()
    assert running.error is None


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


class Metrics:
    """A scrape: sums over labels."""

    def __init__(self, http: httpx.Client) -> None:
        self.samples: dict[str, float] = {}
        self.reasons: dict[str, float] = {}
        self.names: set[str] = set()
        for family in text_string_to_metric_families(http.get("/metrics").text):
            self.names.add(family.name)
            for sample in family.samples:
                if "le" not in sample.labels:
                    self.samples[sample.name] = self.samples.get(sample.name, 0) + sample.value
                if sample.name == "coterie:request_success_total":
                    self.reasons[sample.labels["finished_reason"]] = sample.value

    def __getitem__(self, stem: str) -> float:
        return self.samples.get("coterie:" + stem, 0.0)


def quiet(http: httpx.Client) -> bool:
    now = Metrics(http)
    return now["num_requests_running"] == now["num_requests_waiting"] == now["kv_cache_usage_perc"] == 0


def hang_up(server: Live, body: dict) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    data = json.dumps(body).encode()
    connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def test_both_forms_and_the_client_say_the_same(server, http):
    body = GREEDY | {"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 40}
    whole = http.post(CHAT, json=body).json()
    *chunks, done = events(http.post(CHAT, json=body | {"stream": True}).text)
    text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
    assert done == "[DONE]" and text == whole["choices"][0]["message"]["content"]
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    said = client.chat.completions.create(model="tiny", messages=body["messages"], max_tokens=40, temperature=0,
                                          extra_body={"ignore_eos": True})  # fmt: skip
    assert said.choices[0].message.content == text
    assert said.usage.completion_tokens == whole["usage"]["completion_tokens"] == 40


def test_stop_strings_cut_both_forms_alike(http):
    body = GREEDY | {"prompt": "The quick", "max_tokens": 60}
    full = http.post(TEXT, json=body).json()["choices"][0]["text"]
    stop = full[20:23]
    cut = http.post(TEXT, json=body | {"stop": stop}).json()["choices"][0]
    chunks = events(http.post(TEXT, json=body | {"stop": stop, "stream": True}).text)[:-1]
    assert cut["text"] == full[: full.index(stop)] and cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut["text"]
    assert all(stop not in chunk["choices"][0]["text"] for chunk in chunks)


def test_one_bos_whichever_way(http):
    messages = [{"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    raw = http.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
    assert chat.count(BOS) == raw.count(BOS) == 1 and chat[0] == raw[0] == BOS
    used = http.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert used == len(chat)
    answer = http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, "temperature": 0}).json()
    same = http.post(CHAT, json={"messages": messages, "max_tokens": 2} | GREEDY).json()
    assert answer["usage"]["input_tokens"] == used and answer["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]


def test_scores_of_a_prompt(http):
    body = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 0}
    scored = http.post(TEXT, json=body).json()
    logprobs = scored["choices"][0]["logprobs"]
    assert scored["choices"][0]["text"] == "hello" and scored["usage"]["completion_tokens"] == 0
    assert logprobs["tokens"] == ["<s>", *"hello"] and logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    more = http.post(TEXT, json=body | GREEDY | {"max_tokens": 1}).json()["choices"][0]["logprobs"]
    assert more["token_logprobs"][:6] == logprobs["token_logprobs"] and len(more["tokens"]) == 7


def test_scores_beside_the_answer_are_those_of_an_echo(http):
    body = {"prompt": "hello", "max_tokens": 1} | GREEDY
    scores = http.post(TEXT, json=body | {"prompt_logprobs": 2, "return_token_ids": True}).json()["choices"][0]
    echo = http.post(TEXT, json=body | {"echo": True, "logprobs": 2}).json()["choices"][0]["logprobs"]
    ids, rows = scores["prompt_token_ids"], scores["prompt_logprobs"]
    assert rows[0] is None and [row[str(i)]["logprob"] for i, row in zip(ids[1:], rows[1:], strict=True)] == (
        echo["token_logprobs"][1 : len(ids)]
    )
    assert all(2 <= len(row) <= 3 for row in rows[1:]) and len(scores["token_ids"]) == 1


def test_counters_add_up(server, http):
    before = Metrics(http)
    assert eventually(lambda: quiet(http))
    usages = []

    def ask(body: dict) -> dict:
        answer = http.post(TEXT, json=GREEDY | {"prompt": "a" * 20, "max_tokens": 5} | body).json()
        usages.append(answer["usage"])
        return answer

    ask({})
    ask({"n": 3})
    ask({"prompt": ["b" * 5, "c" * 7]})
    ask({"prompt": "d" * 100, "max_tokens": 1})
    hit = ask({"prompt": "d" * 100, "max_tokens": 1})
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    ask({"prompt": "e", "echo": True, "logprobs": 0, "max_tokens": 0})
    full = ask({"max_tokens": 60})["choices"][0]["text"]
    ask({"max_tokens": 60, "stop": full[10:12]})
    assert http.post(TEXT, json={"prompt": "a", "temperature": -1}).status_code == 400
    assert http.post(TEXT, json={"prompt": "a" * 500}).status_code == 400
    connection = hang_up(server, {"prompt": "gone", "max_tokens": 250, "stream": True, "ignore_eos": True})
    assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    started = len(usages) + 1 + 1  # one body has two prompts, one was cancelled
    assert eventually(lambda: sum(Metrics(http).reasons.values()) - sum(before.reasons.values()) == started)
    assert eventually(lambda: quiet(http)), "gauges return to 0"
    after = Metrics(http)

    def grown(stem: str) -> float:
        return after[stem] - before[stem]

    reasons = {reason: after.reasons[reason] - before.reasons[reason] for reason in after.reasons}
    assert reasons == {"stop": 1, "length": started - 2, "abort": 1, "error": 0}
    assert grown("time_to_first_token_seconds_count") == started - 1, "the scored prompt gave no token"
    assert grown("e2e_request_latency_seconds_count") == started
    assert grown("request_prompt_tokens_count") == grown("request_generation_tokens_count") == started
    prompt, completion = (sum(u[name] for u in usages) for name in ("prompt_tokens", "completion_tokens"))
    assert grown("prompt_tokens_total") == prompt + len("gone") + 1
    assert completion < grown("generation_tokens_total") <= completion + 250
    assert grown("request_generation_tokens_sum") == grown("generation_tokens_total")
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert grown("prompt_tokens_cached_total") == cached


def test_names_of_another_engine_repeat_the_core(http):
    http.post(TEXT, json={"prompt": "a", "max_tokens": 2})
    metrics = Metrics(http)
    assert {"coterie:" + stem for stem in CORE} <= metrics.names
    assert {"vllm:" + stem for stem in CORE} <= metrics.names
    for stem in CORE:
        ours = {n.removeprefix("coterie:"): v for n, v in metrics.samples.items() if n.startswith("coterie:" + stem)}
        theirs = {n.removeprefix("vllm:"): v for n, v in metrics.samples.items() if n.startswith("vllm:" + stem)}
        assert theirs.items() <= ours.items() and theirs
    assert http.head("/metrics").status_code == 200 and http.head("/metrics").content == b""
    assert "_created" not in http.get("/metrics").text


def test_answers_are_counted_by_route_and_status(http):
    for path in ("/wp-admin", "/v1/x", "/../../etc", "/v1/models/gpt-4", "/v1/models/a/b"):
        http.get(path)
    text = http.get("/metrics").text
    assert 'coterie:http_requests_total{path="other",status="404"}' in text
    assert 'coterie:http_requests_total{path="/v1/models/{model_id}",status="404"} 2.0' in text
    assert "wp-admin" not in text and "gpt-4" not in text and 'path="/metrics",status="200"' in text


def test_hang_ups_give_all_memory_back(server, http):
    assert eventually(lambda: quiet(http))
    before = Metrics(http)
    bodies = [{"n": 1}, {"n": 4}, {"prompt": "p" * 150}, {"prompt": ["a", "b"]}]
    for body, stream, wait in itertools.product(bodies, (True, False), (True, False)):
        asked = {"prompt": "hang", "max_tokens": 90, "ignore_eos": True, "stream": stream} | body
        connection = hang_up(server, asked)
        if wait and stream:
            connection.recv(100)
        connection.close()
    assert eventually(lambda: server.server.state.num_running == 0)
    assert eventually(lambda: quiet(http)), "all blocks are free or only cached"
    after = Metrics(http)
    ended = sum(after.reasons.values()) - sum(before.reasons.values())
    aborted = after.reasons["abort"] - before.reasons["abort"]
    assert 0 < aborted <= ended and after.reasons["error"] == before.reasons["error"]
    assert http.post(TEXT, json={"prompt": "next", "max_tokens": 3}).status_code == 200


def test_long_prompt_is_refused_and_the_next_is_served(http):
    for length, status in ((254, 200), (255, 400), (256, 400), (100_000, 400)):  # BOS comes on top
        response = http.post(TEXT, json={"prompt": "a" * length, "max_tokens": 1})
        assert response.status_code == status
        if status == 400:
            message = response.json()["error"]["message"]
            assert "256" in message and str(length + 1) in message and "max_tokens=1" in message
        assert http.post(TEXT, json={"prompt": "behind", "max_tokens": 1}).status_code == 200


def test_full_queue_is_429_and_clears(server, http):
    bodies = [GREEDY | {"prompt": f"{i}", "max_tokens": 200, "n": 4} for i in range(8)]
    answers: list[httpx.Response] = []

    def ask(body: dict) -> None:
        answers.append(httpx.post(server.url + TEXT, json=body, timeout=60))

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    codes = sorted(answer.status_code for answer in answers)
    assert len(codes) == 8 and set(codes) <= {200, 429} and 200 in codes
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
    for over in ({"prompt": "x", "n": 13}, {"prompt": ["x", "y"], "n": 7}):
        refused = http.post(TEXT, json=over)
        assert refused.status_code == 400, "12 sequences may run or wait: this can never fit, so 429 would be a lie"
        assert refused.json()["error"]["param"] == "n" and "12 sequences" in refused.json()["error"]["message"]
    assert http.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_seed_decides(http):
    body = {"prompt": "dice", "max_tokens": 30, "ignore_eos": True, "seed": 5, "n": 2}
    first, again = (http.post(TEXT, json=body).json()["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in again]
    assert first[0]["text"] != first[1]["text"]
