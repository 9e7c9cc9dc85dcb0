"""The official client against a live server: what it sends is understood, what it gets it can read."""

from __future__ import annotations

import openai
import pytest
from server_fakes import BOS, HANG, MockEngine, eventually, live, make_state, post, say

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.config import Access, ApiKey

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine():
    return MockEngine()


@pytest.fixture(scope="module")
def client(engine):
    with live(engine, access=Access(api_keys=(ApiKey("secret"),))) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["mock-model"]
    assert client.models.retrieve("mock-model").id == "mock-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_chat(client, engine):
    answer = client.chat.completions.create(
        model="mock-model", messages=MESSAGES, max_completion_tokens=5, logprobs=True, top_logprobs=1,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert bytes(b for entry in answer.choices[0].logprobs.content for b in entry.bytes) == b"Hello"
    assert answer._request_id == answer.id
    assert engine.asked[-1][1].top_k == 5


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_chat_stream_with_and_without_usage(client, n, asked):
    options = {"stream_options": {"include_usage": True}} if asked else {}
    texts, usage, ends = [""] * n, [], []
    with client.chat.completions.create(model="mock-model", messages=MESSAGES, n=n, stream=True, **options) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] * (choice.finish_reason is not None)
            if chunk.usage is not None:
                assert chunk.choices == []
                usage.append(chunk.usage)
    assert texts == ["Hello"] * n and ends == ["stop"] * n
    assert len(usage) == asked
    if asked:
        assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (20, 5 * n)


def test_responses(client, engine):
    answer = client.responses.create(model="mock-model", input="hi", instructions="be brief", max_output_tokens=5)
    assert answer.output_text == "Hello" and answer.status == "completed" and answer._request_id == answer.id
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (36, 5)
    history = [{"role": "user", "content": "hi"}, *answer.output, {"role": "user", "content": "again"}]
    client.responses.create(model="mock-model", input=history)
    assert bytes(engine.asked[-1][0][1:]) == b"[user]hi[assistant]Hello[user]again[assistant]"
    with client.responses.stream(model="mock-model", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == "Hello" == stream.get_final_response().output_text
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="mock-model", input="hi", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"


def test_completions(client, engine):
    answer = client.completions.create(model="mock-model", prompt=[[1, 2], [3]], echo=True, logprobs=1, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["\x01\x02H", "\x03H"]
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
    text = "".join(c.choices[0].text for c in client.completions.create(model="mock-model", prompt="hi", stream=True))
    assert text == "Hello" and engine.asked[-1][0] == [BOS, *b"hi"]


def test_errors_have_their_classes(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="mock-model", messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="mock-model", input="a")


def test_failure_in_mid_stream_is_raised_by_the_client():
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), 0.05, RuntimeError("x")])
    with live(engine) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="mock-model", messages=MESSAGES, stream=True))


def test_a_poison_request_is_sent_once():
    engine = MockEngine(lambda *_: [PromptInfo(), RuntimeError("poison")])
    with live(engine) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="mock-model", messages=MESSAGES)
    assert len(engine.started) == 1


def test_a_busy_engine_is_asked_again():
    engine = MockEngine(say("Hello"))
    engine.max_open = 0
    response = post(make_state(engine), "/v1/completions", {"prompt": "a"})
    assert response.status_code == 429 and "x-should-retry" not in response.headers


def test_closing_a_stream_aborts():
    engine = MockEngine(lambda *_: [PromptInfo(), ChoiceDelta(0, "a", (1,)), HANG])
    with live(engine) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="mock-model", messages=MESSAGES, stream=True)
        next(stream)
        stream.close()
        client.close()
        assert eventually(lambda: engine.aborted == engine.started)
