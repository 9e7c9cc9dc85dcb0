"""What answers look like, streamed and whole: text, usage (D3), log-probabilities, choices, errors after the start."""

from __future__ import annotations

import httpx
import pytest
from server_fakes import HANG, MockEngine, events, get, live, make_state, post, say

from coterie.engine.errors import EngineBusy, EngineDead
from coterie.engine.messages import TokenLogprob
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.app import PATHS, create_app
from coterie.server.config import Access, ApiKey
from coterie.server.logprobs import token_name

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
RAW = {"prompt": "hi"}
USAGE = {"include_usage": True}


def stream(engine, path, body):
    response = post(engine, path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    return events(response.text)


def joined(chunks, index=0):
    """The text of a choice from a stream of either kind."""
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in found)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path, body", [(CHAT, HELLO), (TEXT, RAW)])
def test_both_forms_say_the_same(path, body, n):
    engine = MockEngine(say("ďHello 漢"))
    engine.script = scripted_pieces(["ď", "Hel", "", "lo ", "漢"])
    whole = post(engine, path, body | {"n": n}).json()
    *chunks, last = stream(engine, path, body | {"n": n})
    assert last == "[DONE]"
    for i in range(n):
        choice = whole["choices"][i]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert choice["index"] == i and choice["finish_reason"] == "stop"
        assert joined(chunks, i) == text == "ďHello 漢"
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert [e for e in ends if e] == ["stop"] and ends[-1] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}


def scripted_pieces(pieces):
    def script(prompt, params):
        items = [PromptInfo(7)]
        for k, piece in enumerate(pieces):
            end = "stop" if k == len(pieces) - 1 else None
            items += [ChoiceDelta(i, piece, (5,), finish_reason=end) for i in range(params.n)]
        return items

    return script


def test_first_chunk_of_each_choice_carries_the_role():
    *chunks, _ = stream(MockEngine(), CHAT, HELLO | {"n": 2})
    for i in range(2):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
        assert deltas[-1] == {}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("text", ["Hello", ""])
@pytest.mark.parametrize("path, body, prompt", [(CHAT, HELLO, 20), (TEXT, RAW, 3)])
def test_usage_asked_for(path, body, prompt, text, n):
    *chunks, last, done = stream(MockEngine(say(text, cached=2)), path, body | {"n": n, "stream_options": USAGE})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": n * len(text),
        "total_tokens": prompt + n * len(text),
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert post(MockEngine(say(text, cached=2)), path, body | {"n": n}).json()["usage"] == last["usage"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path, body", [(CHAT, HELLO), (TEXT, RAW)])
def test_usage_not_asked_for(path, body, options):
    *chunks, _ = stream(MockEngine(), path, body | {"stream_options": options})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("path, body", [(CHAT, HELLO), (TEXT, RAW)])
def test_continuous_usage_grows(path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = stream(MockEngine(), path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 5
    assert last["choices"] == []


def test_several_prompts_and_choices():
    engine = MockEngine()
    engine.script = lambda prompt, params: say(f"<{len(prompt)}>")(prompt, params)
    prompts = [[1], [1, 2], [1, 2, 3]]
    whole = post(engine, TEXT, {"prompt": prompts, "n": 2}).json()
    *chunks, last, _ = stream(engine, TEXT, {"prompt": prompts, "n": 2, "stream_options": USAGE})
    expected = ["<1>", "<1>", "<2>", "<2>", "<3>", "<3>"]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [joined(chunks, i) for i in range(6)] == expected
    assert whole["usage"] == last["usage"]
    assert whole["usage"]["prompt_tokens"] == 6 and whole["usage"]["completion_tokens"] == 18
    assert [c["text"] for c in post(engine, TEXT, {"prompt": ["a", "bc"]}).json()["choices"]] == ["<2>", "<3>"]


def test_lengths():
    engine = MockEngine()
    post(engine, TEXT, RAW)
    post(engine, CHAT, HELLO)
    post(engine, CHAT, HELLO | {"max_tokens": 7})
    post(engine, CHAT, HELLO | {"max_tokens": 7, "max_completion_tokens": 3})
    post(engine, TEXT, {"prompt": [1] * 120})
    assert [params.max_tokens for _, params in engine.asked] == [16, None, 7, 3, None]
    cut = post(engine, CHAT, HELLO | {"max_completion_tokens": 3}).json()
    assert cut["choices"][0]["message"]["content"] == "Hel"
    assert cut["choices"][0]["finish_reason"] == "length"


def test_fields_reach_the_engine():
    engine = MockEngine()
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "logit_bias": {"7": 1}, "seed": 11, "stop": "x", "stop_token_ids": [9],
        "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    post(engine, CHAT, HELLO | body)
    post(engine, CHAT, HELLO | {"stop": ["x", "y"]})
    params = engine.asked[0][1]
    for name, value in body.items():
        expected = {"logit_bias": {7: 1.0}, "stop": ("x",), "stop_token_ids": (9,)}.get(name, value)
        assert getattr(params, name) == expected
    assert engine.asked[1][1].stop == ("x", "y")
    assert engine.asked[1][1].temperature == 1.0 and engine.asked[1][1].skip_special_tokens is True


def test_stop_reason_is_told():
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,), finish_reason="stop", stop_reason="END")])
    assert post(engine, TEXT, RAW).json()["choices"][0]["stop_reason"] == "END"
    *_, end, _ = stream(engine, CHAT, HELLO)
    assert end["choices"][0]["stop_reason"] == "END"


def test_chat_logprobs():
    engine = MockEngine()
    whole = post(engine, CHAT, HELLO | {"logprobs": True, "top_logprobs": 2}).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == list("Hello")
    first = whole["content"][0]
    assert first["logprob"] == -0.5 and first["bytes"] == [72]
    assert [best["token"] for best in first["top_logprobs"]] == ["H", "x"]
    *chunks, _ = stream(engine, CHAT, HELLO | {"logprobs": True, "top_logprobs": 2})
    parts = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == whole["content"]
    bare = post(engine, CHAT, HELLO | {"logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []
    assert post(engine, CHAT, HELLO).json()["choices"][0]["logprobs"] is None
    assert post(engine, CHAT, HELLO | {"top_logprobs": 2}).status_code == 400


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("text_of", ["string", "ids"])
def test_echo_with_logprobs(max_tokens, text_of):
    engine = MockEngine()
    prompt = "hi" if text_of == "string" else [104, 105]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    bos = text_of == "string"
    answer = post(engine, TEXT, body).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    said = "Hello"[:max_tokens]
    assert choice["text"] == "hi" + said
    assert logprobs["tokens"] == ["<s>"] * bos + list("hi" + said)
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(logprobs["tokens"]) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][-1] == {logprobs["tokens"][-1]: -0.5}
    assert logprobs["text_offset"] == [0] * bos + list(range(2 + max_tokens))
    assert choice["finish_reason"] == ("stop" if max_tokens == 5 else "length")
    assert answer["usage"]["completion_tokens"] == max_tokens
    *chunks, _ = stream(engine, TEXT, body)
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert joined(chunks) == choice["text"]
    for name in logprobs:
        assert [entry for part in parts for entry in part[name]] == logprobs[name]


def test_echo_without_logprobs_and_with_choices():
    answer = post(MockEngine(), TEXT, {"prompt": ["ab", "c"], "n": 2, "echo": True, "max_tokens": 1}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abH", "abH", "cH", "cH"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    nothing = post(MockEngine(), TEXT, {"prompt": "ab", "max_tokens": 0}).json()["choices"][0]
    assert nothing["text"] == "" and nothing["finish_reason"] == "length"


def test_scores_of_the_prompt_beside_the_answer():
    body = {"prompt": [[65, 66, 67], [68]], "prompt_logprobs": 1, "max_tokens": 1, "n": 2, "echo": True, "logprobs": 2}
    choices = post(MockEngine(), TEXT, body).json()["choices"]
    second = {"66": {"logprob": -0.5, "rank": 1, "decoded_token": "B"}}
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 1, 1]
    assert choices[0]["prompt_logprobs"][:2] == [None, second] == choices[1]["prompt_logprobs"][:2]
    assert len(choices[0]["logprobs"]["top_logprobs"][1]) == 2, "an echo shows as many as logprobs says"
    without = post(MockEngine(), TEXT, {"prompt": "hi"}).json()["choices"][0]
    assert not {"prompt_logprobs", "token_ids", "prompt_token_ids"} & set(without)
    engine = MockEngine()
    refused = post(engine, TEXT, body | {"stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs" and not engine.started


@pytest.mark.parametrize("echo", [False, True])
def test_ids_of_prompt_and_answer(echo):
    body = {"prompt": [[65, 66], [67]], "n": 2, "max_tokens": 3, "return_token_ids": True, "echo": echo}
    whole = post(MockEngine(), TEXT, body).json()["choices"]
    assert [choice["token_ids"] for choice in whole] == [list(b"Hel")] * 4
    assert [choice["prompt_token_ids"] for choice in whole] == [[65, 66], [65, 66], [67], [67]]
    news = [choice for chunk in stream(MockEngine(), TEXT, body)[:-1] for choice in chunk["choices"]]
    for i, choice in enumerate(whole):
        mine = [piece for piece in news if piece["index"] == i and "token_ids" in piece]
        assert [token for piece in mine for token in piece["token_ids"]] == choice["token_ids"]
        prompts = [piece["prompt_token_ids"] for piece in mine if "prompt_token_ids" in piece]
        assert prompts == [choice["prompt_token_ids"]]


def test_logprobs_of_odd_values():
    rows = ((TokenLogprob(0xC4, -9999.0, 9), TokenLogprob(65, -0.1, 1)),)
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "\ufffd", (0xC4,), rows, "length")])
    chat = post(engine, CHAT, HELLO | {"logprobs": True, "top_logprobs": 1}).json()["choices"][0]["logprobs"]["content"]
    assert chat[0]["bytes"] == [0xC4] and chat[0]["logprob"] == -9999.0 and chat[0]["top_logprobs"][0]["token"] == "A"
    text = post(engine, TEXT, RAW | {"logprobs": 1}).json()["choices"][0]["logprobs"]
    assert text["tokens"] == ["bytes:\\xc4"] and text["top_logprobs"] == [{"A": -0.1, "bytes:\\xc4": -9999.0}]
    assert token_name("漢".encode()) == "漢"


def test_failure_before_the_first_token_is_an_http_error():
    for streamed in (False, True):
        for error, status in ((EngineBusy("full", 3), 429), (EngineDead("gone"), 503), (RuntimeError("secret"), 500)):
            engine = MockEngine(lambda *_, e=error: [PromptInfo(), e])
            response = post(engine, CHAT, HELLO | {"stream": streamed})
            assert response.status_code == status
            assert "secret" not in response.text
            assert ("retry-after" in response.headers) == (status != 500)
            assert response.headers.get("x-should-retry") == ("false" if status == 500 else None)
        engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "", finish_reason="error", error="bad step")])
        response = post(engine, TEXT, RAW | {"stream": streamed})
        assert response.status_code == 500 and "bad step" in response.json()["error"]["message"]


def test_full_queue_is_429_with_retry_after():
    engine = MockEngine()
    engine.max_open = 1
    response = post(engine, TEXT, {"prompt": ["a", "b"]})
    assert response.status_code == 429 and response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "queue_full"
    assert engine.started == engine.aborted, "the prompt that had started was stopped"


@pytest.mark.parametrize("path, body", [(CHAT, HELLO), (TEXT, RAW)])
@pytest.mark.parametrize("failure", [
    RuntimeError("secret"), ChoiceDelta(0, "", finish_reason="error", error="bad step"), EngineDead("gone"),
])  # fmt: skip
def test_failure_in_mid_stream_is_one_error_event_and_no_done(path, body, failure):
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), 0.02, ChoiceDelta(0, "b", (2,)), failure])
    *chunks, last = stream(engine, path, body | {"stream_options": USAGE})
    assert joined(chunks) == "ab"
    assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error" and "secret" not in str(last)


def test_failed_choice_ends_its_sisters():
    engine = MockEngine(
        lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), ChoiceDelta(1, "", finish_reason="error", error="x"), HANG]
    )
    *_, last = stream(engine, CHAT, HELLO | {"n": 2})
    assert "error" in last
    assert engine.aborted == engine.started


def test_pings_keep_a_silent_stream_open():
    engine = MockEngine(lambda *_: [0.35, PromptInfo(), ChoiceDelta(0, "a", (1,)), 0.25,
                                    ChoiceDelta(0, "b", (2,), finish_reason="stop")])  # fmt: skip
    response = post(make_state(engine, sse_ping_seconds=0.1), CHAT, HELLO | {"stream": True})
    assert response.text.startswith(": ping\n\n")
    assert response.text.count(": ping\n\n") >= 4
    *chunks, done = events(response.text)
    assert joined(chunks) == "ab" and done == "[DONE]"


def test_failure_after_pings_is_an_event():
    engine = MockEngine(lambda *_: [0.2, RuntimeError("x")])
    response = post(make_state(engine, sse_ping_seconds=0.05), CHAT, HELLO | {"stream": True})
    assert response.status_code == 200
    assert set(events(response.text)[-1]) == {"error"}


def test_unknown_routes_and_methods():
    engine = MockEngine()
    for path in ("/", "/v1/embeddings", "/docs", "/v1/chat/completions/x"):
        response = post(engine, path, {})
        assert response.status_code == 404 and response.json()["error"]["code"] == "route_not_found"
    response = get(engine, CHAT)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_unforeseen_error_is_a_500_without_its_text(caplog):
    engine = MockEngine()
    engine.tokenizer.decode = None
    response = post(engine, "/detokenize", {"tokens": [1]})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error" and "NoneType" not in response.text
    assert any(record.exc_info for record in caplog.records), "the log says why"


def test_status_routes():
    engine = MockEngine()
    for path in ("/health", "/ping", "/ready"):
        assert get(engine, path).status_code == 200 and get(engine, path, "HEAD").status_code == 200
        loading = get(make_state(None), path)
        assert loading.status_code == 503 and loading.json()["status"] == "loading" and loading.headers["retry-after"]
    engine.alive = False
    assert get(engine, "/health").status_code == 503
    engine.ready = False
    assert get(engine, "/ready").status_code == 503
    assert get(engine, "/version").json()["version"]


@pytest.mark.parametrize("phase, code", [("loading", "loading"), ("draining", "shutting_down")])
def test_no_model_no_answer(phase, code):
    state = make_state(MockEngine())
    state.phase = phase
    for response in (post(state, CHAT, HELLO), get(state, "/v1/models"), post(state, "/tokenize", {"prompt": "a"})):
        assert response.status_code == 503 and response.json()["error"]["code"] == code
        assert int(response.headers["retry-after"]) >= 1
    assert get(state, "/ready").status_code == 503


def references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_openapi_is_complete():
    state = make_state(MockEngine(), access=Access(api_keys=(ApiKey("k"),)))
    document = get(state, "/openapi.json", Authorization="Bearer k").json()
    assert set(document["paths"]) == PATHS - {"/openapi.json", "/v1/admin/reload"} | {"/v1/models/{model_id}"}
    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= set(schemas)
    chat = document["paths"][CHAT]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert {"200", "400", "401", "404", "408", "413", "429", "500", "503"} <= set(chat["responses"])
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["ChatRequest"]["properties"]["messages"]["minItems"] == 1
    assert document["security"] == [{"key": []}]
    operations = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(operations) == len(set(operations))


def test_fastapi_validates_nothing():
    """Bodies are decoded once, by msgspec: no route declares a body to FastAPI."""
    app = create_app(make_state(MockEngine()))
    routes = [route for route in app.routes if hasattr(route, "body_field")]
    assert routes and all(route.body_field is None for route in routes)


def test_real_socket_streams_piece_by_piece():
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), HANG])
    with live(engine) as server, httpx.stream("POST", server.url + TEXT, json=RAW | {"stream": True}) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        first = next(response.iter_text())
        assert events(first)[0]["choices"][0]["text"] == "a"
