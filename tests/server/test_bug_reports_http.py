"""Bug reports E1, E2, F1 and L1 against a real engine behind the real server.

E1, E2, F1: every hostile value is a 400 that names its field, and the request right behind it is served. L1: counters
after ten requests of ten kinds obey their conservation laws.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_server import TEXT, Live, Spy, long_folder, open_request, real_server, wait
from server_fakes import TINY, tiny_folder

CONTEXT = 128
VOCAB = TINY["vocab_size"]
BASE = {"prompt": "The quick brown fox", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Spy]]:
    options = {"max_model_len": CONTEXT, "max_running_requests": 4, "max_queued_requests": 64}
    with real_server(tiny_folder(tmp_path_factory.mktemp("tiny")), **options) as pair:
        yield pair


@pytest.fixture
def http(bench: tuple[Live, Spy]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bench[0].url, timeout=60) as client:
        yield client


def post(http: httpx.Client, body: dict[str, Any] | bytes) -> httpx.Response:
    return http.post(TEXT, content=body if isinstance(body, bytes) else json.dumps(body))


def text_of(http: httpx.Client, **fields: Any) -> str:
    response = post(http, BASE | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def refused(bench: tuple[Live, Spy], http: httpx.Client, body: dict[str, Any] | bytes, field: str) -> str:
    """A 400 before the engine heard of it; the next request is served. Returns the message."""
    known = len(bench[1].adds)
    response = post(http, body)
    assert response.status_code == 400, response.text[:200]
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] == field and field in error["message"]
    assert len(bench[1].adds) == known, "the engine heard of it"
    assert post(http, BASE | {"max_tokens": 2}).json()["usage"]["completion_tokens"] == 2
    return error["message"]


# E1


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("literal", ["NaN", "-NaN", "Infinity", "-Infinity", "1e999", '"0.5"', "true", "[]", "-3"])
def test_e1_what_is_no_sane_number_is_refused(
    bench: tuple[Live, Spy], http: httpx.Client, field: str, literal: str
) -> None:
    refused(bench, http, b'{"prompt": "a", "max_tokens": 2, "%s": %s}' % (field.encode(), literal.encode()), field)


@pytest.mark.parametrize(("field", "value"), [("temperature", 2.1), ("top_p", 1.01), ("top_k", -2), ("min_p", 1.01)])
def test_e1_just_outside_is_refused(bench: tuple[Live, Spy], http: httpx.Client, field: str, value: float) -> None:
    refused(bench, http, BASE | {field: value}, field)


def test_e1_the_edges_that_are_the_top_token(http: httpx.Client) -> None:
    greedy = text_of(http, temperature=0)
    together = {"top_p": 0, "top_k": 10**9, "min_p": 1}
    for fields in (
        {"temperature": 1e-9}, {"temperature": 1e-5}, {"top_p": 0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1},
        {"temperature": 2, "top_p": 0, "top_k": 0, "min_p": 0}, {"temperature": 0, **together}, together,
    ):  # fmt: skip
        assert text_of(http, seed=3, **fields) == greedy, fields


def test_e1_the_edges_that_are_off(http: httpx.Client) -> None:
    plain = text_of(http, seed=3, temperature=1)
    for fields in ({"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 1}, {"min_p": 0}):
        assert text_of(http, seed=3, temperature=1, **fields) == plain, fields
    assert plain != text_of(http, temperature=0)
    for temperature in (1e-4, 2):
        assert text_of(http, temperature=temperature)


# E2


@pytest.mark.parametrize(
    "bias",
    [{"999999": 5}, {str(VOCAB): 5}, {"-1": 5}, {"abc": 5}, {"1.5": 5}, {"": 5}, {str(2**64): 5}, {"5": "5"},
     {"5": True}, {"5": None}, [5], 5, {str(i): 1 for i in range(100_000)}],
    ids=lambda bias: str(bias)[:12],
)  # fmt: skip
def test_e2_bias_of_no_token(bench: tuple[Live, Spy], http: httpx.Client, bias: object) -> None:
    refused(bench, http, BASE | {"logit_bias": bias}, "logit_bias")


def test_e2_bias_is_clamped_to_a_hundred(http: httpx.Client) -> None:
    assert text_of(http, temperature=1, logit_bias={"65": 1e30}) == "A" * 8
    assert text_of(http, temperature=1, seed=4, logit_bias={"65": 1e30}) == text_of(
        http, temperature=1, seed=4, logit_bias={"65": 100}
    )
    greedy = text_of(http, temperature=0)
    banned = text_of(http, temperature=0, logit_bias={str(byte): -1e30 for byte in greedy.encode()[:1]})
    assert banned[:1] != greedy[:1]


@pytest.mark.parametrize(
    "prompt", [[-1], [VOCAB], [2**32 - 1], [2**63], [True], [1.5], [[1, 2], [-1]], [1, VOCAB], [1, None], ["a", 5]],
    ids=str,
)  # fmt: skip
def test_e2_prompts_of_no_tokens(bench: tuple[Live, Spy], http: httpx.Client, prompt: object) -> None:
    known = len(bench[1].aborts)
    if prompt == [[1, 2], [-1]]:  # one of several prompts: what had started is stopped
        error = post(http, {"prompt": prompt, "max_tokens": 5}).json()["error"]
        assert error["param"] == "prompt" and len(bench[1].aborts) <= known + 1
        return
    refused(bench, http, {"prompt": prompt, "max_tokens": 5}, "prompt")


def test_e2_a_vocabulary_that_is_padded_past_the_tokenizer(http: httpx.Client) -> None:
    """Ids 258 to 263 have rows in the model and no token: legal in a prompt, without text, and never generated."""
    padding = {str(token): 100 for token in range(258, VOCAB)}
    answer = post(http, BASE | {"prompt": [65, 258, VOCAB - 1], "temperature": 0, "logit_bias": padding}).json()
    plain = post(http, BASE | {"prompt": [65, 258, VOCAB - 1], "temperature": 0}).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"], "padding cannot win, whatever its bias"
    assert http.post("/detokenize", json={"tokens": [65, 258, VOCAB - 1, 66]}).json()["prompt"] == "AB"
    assert http.post("/detokenize", json={"tokens": [VOCAB]}).status_code == 400


# F1


@pytest.mark.parametrize(("length", "max_tokens", "fits"), [
    (127, 1, True), (127, None, True), (127, 2, False), (128, 1, False), (128, None, False), (129, 1, False),
    (129, None, False), (100_000, 1, False), (100_000, 10**6, False), (5, 10**6, False), (5, 2**31 - 1, False),
    (5, 123, True), (5, 124, False), (120, None, True),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_f1_the_context_is_a_limit_with_three_numbers(
    bench: tuple[Live, Spy], http: httpx.Client, length: int, max_tokens: int | None, fits: bool, stream: bool
) -> None:
    body = {"prompt": [7] * length, "ignore_eos": True, "stream": stream}
    body |= {} if max_tokens is None else {"max_tokens": max_tokens}
    if not fits:
        message = refused(bench, http, body, "prompt" if length >= CONTEXT else "max_tokens")
        assert str(CONTEXT) in message and str(length) in message
        assert ("no max_tokens" if max_tokens is None else f"max_tokens={max_tokens}") in message
        return
    response = post(http, body | ({"stream_options": {"include_usage": True}} if stream else {}))
    assert response.status_code == 200
    assert f'"completion_tokens":{max_tokens or CONTEXT - length}' in response.text, "the room that is left is the cap"
    assert '"finish_reason":"length"' in response.text


@pytest.mark.parametrize(("keep", "max_tokens", "used"), [(3, 1, 3), (127, 1, 127), (-1, 28, 100), (-1, None, None)])
def test_f1_a_truncated_prompt_is_served(
    bench: tuple[Live, Spy], http: httpx.Client, keep: int, max_tokens: int | None, used: int | None
) -> None:
    body = {"prompt": [9] * 100_000, "truncate_prompt_tokens": keep, "ignore_eos": True}
    answer = post(http, body | ({} if max_tokens is None else {"max_tokens": max_tokens})).json()
    assert answer["usage"]["prompt_tokens"] == used or (used is None and answer["usage"]["prompt_tokens"] < CONTEXT)
    assert answer["usage"]["completion_tokens"] >= 1 and answer["usage"]["total_tokens"] <= CONTEXT
    refused(bench, http, {"prompt": [9] * 200, "truncate_prompt_tokens": 129, "max_tokens": 1}, "prompt")


# L1


class Scrape:
    """/metrics: sums over labels, and the label names that occur."""

    def __init__(self, http: httpx.Client) -> None:
        self.samples: dict[str, float] = {}
        self.reasons: dict[str, float] = {}
        self.labels: set[str] = set()
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                self.labels |= sample.labels.keys()
                if "le" not in sample.labels:
                    self.samples[sample.name] = self.samples.get(sample.name, 0) + sample.value
                if sample.name == "coterie:request_success_total":
                    self.reasons[sample.labels["finished_reason"]] = sample.value

    def __getitem__(self, stem: str) -> float:
        return self.samples.get("coterie:" + stem, 0.0)


def test_l1_counters_of_ten_requests(tmp_path) -> None:
    """Plain, n = 3, stop string, four that preempt each other, prefix hit, cancelled in the queue and in decode."""
    options = {"max_model_len": 256, "max_running_requests": 4, "max_queued_requests": 8, "kv_cache_tokens": 384}
    with real_server(long_folder(tmp_path), **options) as (server, spy), httpx.Client(
        base_url=server.url, timeout=60
    ) as http:
        began = time.monotonic()
        usages: list[dict] = []

        def ask(**fields: Any) -> dict:
            answer = http.post(TEXT, json=BASE | {"temperature": 0} | fields).json()
            usages.append(answer["usage"])
            return answer

        plain = ask()
        ask(n=3)
        stop = plain["choices"][0]["text"][3:5]
        assert ask(stop=stop)["choices"][0]["finish_reason"] == "stop"
        ask(prompt=[5] * 100)
        assert ask(prompt=[5] * 100)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        threads = [
            threading.Thread(target=ask, kwargs={"prompt": [10 + i] * 30, "max_tokens": 210}) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert max(spy.preemptions.values()) >= 2, "one of them was preempted twice"
        assert post(http, BASE | {"temperature": -1}).status_code == 400
        assert post(http, BASE | {"prompt": [5] * 257}).status_code == 400

        known = len(spy.adds)
        spy.hold(lambda request: request.num_output_tokens == 3)
        running = open_request(server.url, BASE | {"max_tokens": 200, "n": 4, "temperature": 0})
        assert spy.held.wait(30)
        queued = open_request(server.url, BASE | {"max_tokens": 200})
        wait(lambda: len(spy.adds) == known + 5)
        queued.close()
        wait(lambda: len(spy.aborts) >= 1 and spy.adds[-1] in spy.aborts)
        running.close()
        wait(lambda: set(spy.adds[known:]) <= set(spy.aborts))
        spy.release.set()
        wait(lambda: spy.is_quiet)
        assert spy.adds[-1] not in set().union(*spy.steps)

        def is_still() -> bool:
            now = Scrape(http)
            return now["num_requests_running"] == now["num_requests_waiting"] == now["kv_cache_usage_perc"] == 0

        wait(is_still)
        now = Scrape(http)
        elapsed = time.monotonic() - began

    requests = 9 + 2
    assert now.reasons == {"stop": 1, "length": 8, "abort": 2, "error": 0}
    assert sum(now.reasons.values()) == requests == now["e2e_request_latency_seconds_count"]
    gave_a_token = requests - 1
    assert now["time_to_first_token_seconds_count"] == gave_a_token
    assert now["request_queue_time_seconds_count"] == now["request_prefill_time_seconds_count"] == gave_a_token
    assert now["request_decode_time_seconds_count"] == gave_a_token
    shares = now["request_queue_time_seconds_sum"] + now["request_prefill_time_seconds_sum"]
    assert shares == pytest.approx(now["time_to_first_token_seconds_sum"], abs=1e-3 * gave_a_token)
    assert now["request_prefill_time_seconds_sum"] > 0
    assert now["e2e_request_latency_seconds_sum"] < elapsed * requests, "seconds, not milliseconds"
    prompt, completion = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    cancelled = 2 * (len(BASE["prompt"]) + 1)
    assert now["prompt_tokens_total"] == prompt + cancelled
    aborted = sum(spy.tokens[name] for name in spy.adds[known:])
    assert completion <= now["generation_tokens_total"] <= completion + aborted, "a character cut in half is not shown"
    assert now["request_generation_tokens_sum"] == now["generation_tokens_total"]
    assert now["request_prompt_tokens_sum"] == now["prompt_tokens_total"]
    assert now["num_preemptions_total"] == sum(spy.preemptions.values()) >= 2
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert now["prefix_cache_hits_total"] >= now["prompt_tokens_cached_total"] == cached
    assert now.labels == {"model_name", "finished_reason", "path", "status", "le", "stage"}, "bounded labels only"
