"""A big answer leaves the event loop to others: what is encoded in one turn of it is bounded, whatever was asked for.

Counted in bytes of JSON, as `server.turns` does; the engine's news come all at once, as after a loop that was behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from server_fakes import MockEngine, MockStream, ask, events, make_state

from coterie.engine.admission import Door
from coterie.engine.config import EngineConfig
from coterie.engine.messages import SamplingParams, TokenLogprob
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server import streaming, turns
from coterie.server.chat import prepare_chat
from coterie.server.completions import prepare_completions
from coterie.server.generation import Event
from coterie.server.protocol import ChatRequest, CompletionRequest
from coterie.server.responses import prepare_responses
from coterie.server.responses_protocol import ResponsesRequest
from coterie.server.turns import TURN_BYTES, EncodedList, Turn

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
N, LENGTH, TOP = 48, 40, 20
CONTEXT = 4096
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def row(token: int, k: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(97 + (token + j) % 26, -0.5 - j, j + 1) for j in range(k + 1))


def script(prompt: list[int], params: SamplingParams) -> list[Any]:
    scores = None
    if params.prompt_logprobs is not None:
        scores = [None, *(list(row(token, params.prompt_logprobs)) for token in prompt[1:])]
    found: list[Any] = [PromptInfo(0, scores)]
    for place in range(LENGTH):
        for index in range(params.n):
            logprobs = None if params.logprobs is None else (row(place, params.logprobs),)
            end: Any = "length" if place == LENGTH - 1 else None
            found.append(ChoiceDelta(index, chr(97 + place % 26), (97 + place % 26,), logprobs, end))
    return found


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> MockEngine:
    async def at_once(self: MockStream, items: list[Any], wake: Callable[[], None]) -> None:
        self._news.extend(items)
        self._end(self._engine.finished)
        wake()

    monkeypatch.setattr(MockStream, "_play", at_once)
    found = MockEngine(script, context=CONTEXT)
    found.config = EngineConfig(max_running_requests=64)
    found._door = Door(vocab_size=300, max_model_len=CONTEXT, max_running=64, max_queued=64, has_text=True)
    return found


class Counting:
    """An encoder that counts what it makes until somebody looks."""

    def __init__(self) -> None:
        self.made = self.most = self.total = 0

    def encode(self, value: Any) -> bytes:
        data = msgspec.json.encode(value)
        self.made += len(data)
        self.total += len(data)
        return data

    async def watch(self) -> None:
        """Another's task: it has a turn in every turn of the loop."""
        while True:
            self.most = max(self.most, self.made)
            self.made = 0
            await asyncio.sleep(0)


CASES = [
    (CHAT, {"messages": MESSAGES, "n": N, "logprobs": True, "top_logprobs": TOP}),
    (TEXT, {"prompt": "hi", "n": N, "logprobs": TOP}),
    (TEXT, {"prompt": "hi" * 1000, "n": 2, "logprobs": TOP, "echo": True}),
    (RESPONSES, {"input": "hi", "top_logprobs": TOP}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CASES, ids=["chat", "text", "echo", "responses"])
def test_a_turn_is_bounded(
    engine: MockEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], *, stream: bool
) -> None:
    counting = Counting()
    monkeypatch.setattr(turns, "_ENCODER", counting)
    monkeypatch.setattr(streaming, "_ENCODER", counting)

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        watching = asyncio.create_task(counting.watch())
        answer = await client.post(path, json=body | {"stream": stream, "max_tokens": 2 * LENGTH})
        watching.cancel()
        return answer

    answer = ask(make_state(engine, max_choices=64), work)
    assert answer.status_code == 200, answer.text[:300]
    # One piece may begin just before the turn is full; an echo is one event, encoded in pieces and then copied.
    whole_echo = len(answer.content) if body.get("echo") and stream else 0
    assert counting.most <= TURN_BYTES + 2 * turns.PIECE_BYTES + whole_echo
    if path != RESPONSES and not whole_echo:
        assert counting.total > 2 * TURN_BYTES, "the case is big enough to show anything"


def nodes(value: Any) -> int:
    """Values that are still to be encoded one by one."""
    if isinstance(value, msgspec.Struct):
        return 1 + sum(nodes(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(nodes, value))
    return 1 + sum(map(nodes, value.values())) if isinstance(value, dict) else 1


@pytest.mark.parametrize("length", [1, LENGTH])
def test_little_is_left_for_the_end(length: int) -> None:
    """What `answer` gives does not grow with the tokens: their log-probabilities are JSON already."""
    counts = [nodes(whole(path, body, length)) for path, body in CASES]
    assert counts == [nodes(whole(path, body, 1)) for path, body in CASES]


def whole(path: str, body: dict[str, Any], length: int) -> Any:

    prepare: Any
    kind: Any
    kind, prepare = {
        CHAT: (ChatRequest, prepare_chat), TEXT: (CompletionRequest, prepare_completions),
        RESPONSES: (ResponsesRequest, prepare_responses),
    }[path]  # fmt: skip
    state = make_state(MockEngine(context=CONTEXT), max_choices=64)
    call = asyncio.run(prepare(state, state.model(), msgspec.convert(body, kind)))
    gatherer = call.gatherer()
    made = script(call.jobs[0].token_ids, call.jobs[0].params)
    n = call.jobs[0].params.n
    for value in [made[0], *made[1 : 1 + n * (length - 1)], *made[-n:]]:
        assert all(count <= 2 * turns.PIECE_BYTES for count in gatherer.take(Event(0, value)))
    return gatherer.answer()


def test_whole_and_streamed_logprobs_are_the_same(engine: MockEngine) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path, body in CASES[:3]:
            one = (await client.post(path, json=body)).json()["choices"]
            chunks = events((await client.post(path, json=body | {"stream": True})).text)[:-1]
            for choice in one:
                mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
                parts = [c["logprobs"] for c in mine if c["logprobs"] is not None]
                for name in parts[0].keys() - {"refusal"}:
                    assert [entry for part in parts for entry in part[name]] == choice["logprobs"][name]

    ask(make_state(engine, max_choices=64), work)


def test_a_list_that_is_encoded_as_it_grows() -> None:
    found = EncodedList()
    assert not found and msgspec.json.encode({"a": found.json}) == b'{"a":[]}'
    assert found.extend([1, "x"]) == len('1,"x"') and found.extend([]) == 0
    other = found.copy()
    other.extend([[None]])
    assert bytes(found.json) == b'[1,"x"]' and bytes(other.json) == b'[1,"x",[null]]'


def test_a_turn_ends_when_enough_was_made() -> None:
    turn = Turn()
    assert not turn.spend(TURN_BYTES - 1) and turn.spend(1)
    asyncio.run(turn.give())
    assert not turn.spend(0)
    small = sum(1 for _ in iter(lambda: turn.spend(1), True))
    assert 500 < small < 10_000, "events that make little count as well"
