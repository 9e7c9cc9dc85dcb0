"""Service classes over HTTP: tier or key to class, what the answer says, refusals, metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from real_server import serving
from server_fakes import MockEngine, events, get, make_state, post, tiny_folder

from coterie.engine.build import build_engine
from coterie.engine.config import EngineConfig, ServiceConfig
from coterie.server.config import Access, ApiKey

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES = {
    TEXT: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
}
ON = ServiceConfig(enabled=True)


def engine(service: ServiceConfig = ON) -> MockEngine:
    made = MockEngine()
    made.service = service
    return made


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("tier", "name", "said"), [
    ("priority", "gold", "priority"), ("default", "silver", "default"), ("flex", "bronze", "flex"),
    ("auto", "bronze", "flex"), (None, "bronze", "flex"),
])  # fmt: skip
def test_the_tier_chooses_the_class_and_the_answer_says_so(path, tier, name, said):
    made = engine(ServiceConfig(enabled=True, default_class="bronze"))
    response = post(made, path, BODIES[path] | {"service_tier": tier})
    assert response.status_code == 200 and response.json()["service_tier"] == said
    streamed = post(made, path, BODIES[path] | {"service_tier": tier, "stream": True})
    if path == RESPONSES:
        assert streamed.text.count(f'"service_tier":"{said}"') == streamed.text.count('"response":{') >= 2
    else:
        assert all(event["service_tier"] == said for event in events(streamed.text) if event != "[DONE]")
    assert made.classes == [name, name]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("service", [ServiceConfig(), ON])
def test_an_unknown_tier_is_refused_by_name(path, service):
    made = engine(service)
    for wrong in ("gold", "Priority", "scale", ""):
        response = post(made, path, BODIES[path] | {"service_tier": wrong})
        assert response.status_code == 400, wrong
        assert response.json()["error"]["param"] == "service_tier" and '"priority"' in response.text.replace("\\", "")
    assert made.started == []


def test_without_classes_a_tier_changes_nothing_and_is_not_answered():
    made = engine(ServiceConfig())
    response = post(made, CHAT, BODIES[CHAT] | {"service_tier": "priority"})
    assert response.status_code == 200 and "service_tier" not in response.json()
    assert made.classes == [None]


def test_a_key_binds_its_client_to_a_class_whatever_it_asks_for():
    made = engine()
    table = (ApiKey("g", "gold"), ApiKey("b", "bronze"), ApiKey("s", "silver"))
    state = make_state(made, access=Access(api_keys=table))
    for key, tier, said in (("b", "priority", "flex"), ("g", "flex", "priority"), ("s", None, "default")):
        response = post(state, CHAT, BODIES[CHAT] | {"service_tier": tier}, Authorization=f"Bearer {key}")
        assert response.json()["service_tier"] == said
    assert made.classes == ["bronze", "gold", "silver"]
    for wrong in ("x", "", "gold"):
        assert post(state, CHAT, BODIES[CHAT], Authorization=f"Bearer {wrong}").status_code == 401
    assert get(state, "/health").status_code == 200


def test_unbound_keys_let_the_client_choose():
    made = engine()
    state = make_state(made, access=Access(api_keys=(ApiKey("one"), ApiKey("two"))))
    for key in ("one", "two"):
        post(state, CHAT, BODIES[CHAT] | {"service_tier": "priority"}, Authorization=f"Bearer {key}")
    assert made.classes == ["gold", "gold"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("classes"))
    service = ServiceConfig(enabled=True, max_queued=(2, None, None))
    config = EngineConfig(load_format="dummy", threads=1, page_size=16, max_running_requests=2, max_queued_requests=30)
    core, info = build_engine(folder, config, service=service)
    with serving(core, info) as (live, spy):
        yield live, spy


def metric(url: str, name: str, **labels: str) -> float:
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in httpx.get(url + "/metrics").text.splitlines():
        if line.startswith(f"coterie:{name}{{") and wanted <= set(line.split("{")[1].split("}")[0].split(",")):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_counts_of_each_class_add_up_and_a_full_queue_is_the_classs_own(server):
    live, spy = server
    body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    spy.hold(lambda request: True)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(httpx.post, live.url + TEXT, json=body | {"service_tier": "priority"}, timeout=60)
        assert spy.held.wait(10)
        rest = [
            pool.submit(httpx.post, live.url + TEXT, json=body | {"service_tier": tier}, timeout=60)
            for tier in ["priority"] * 6 + ["flex"] * 5
        ]
        done = [future for future in rest[:6]]
        refused = []
        while len(refused) < 3:
            refused = [future for future in done if future.done()]
        spy.release.set()
        answers = [future.result() for future in (first, *rest)]
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(429) == 3 and statuses[7:] == [200] * 5, "bronze has places of its own"
    late = next(answer for answer in answers if answer.status_code == 429)
    assert int(late.headers["retry-after"]) >= 1 and "of class gold" in late.json()["error"]["message"]
    texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
    assert len(texts) == 1
    assert metric(live.url, "class_refused_total", service_class="gold") == 3
    for name, count in (("gold", 4), ("bronze", 5), ("silver", 0)):
        assert metric(live.url, "class_requests_total", service_class=name, finished_reason="length") == count
        assert metric(live.url, "class_time_to_first_token_seconds_count", service_class=name) == count
        met, missed = (metric(live.url, "class_deadline_total", service_class=name, met=met) for met in ("yes", "no"))
        assert met + missed == count, "which it is depends on the machine's load"
        assert metric(live.url, "class_tokens_total", service_class=name, kind="decode") == count * 7
        assert metric(live.url, "class_num_requests_running", service_class=name) == 0
        assert metric(live.url, "class_num_requests_waiting", service_class=name) == 0


def test_every_number_of_a_class_is_shown_for_all_of_them(server):
    live, _ = server
    text = httpx.get(live.url + "/metrics").text
    for name in ("gold", "silver", "bronze"):
        assert f'coterie:class_tokens_total{{kind="decode",model_name="tiny",service_class="{name}"}}' in text
    schema = httpx.get(live.url + "/openapi.json").json()["components"]["schemas"]
    assert all("service_tier" in schema[name]["properties"] for name in ("ChatRequest", "Completion"))
