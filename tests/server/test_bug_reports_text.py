"""Bug reports D1 and D2 through the real server: split characters and stop strings, a byte a token.

The engine answers what the test wrote down; scheduler, detokeniser, stop strings, streaming and JSON are the real ones.
Streamed and whole answers must say the same, and no piece may show what has to be held back.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from real_server import TEXT, Live, Spy, open_request, scripted_server, wait
from server_fakes import events, tiny_folder

HARD = "ď👩‍👩‍👧漢 ا"
INVALID = b"\xff\xfeA\xe6\xbcB\xf0\x9f\x91C\x80 d\xc4"
DOG = "The quick brown fox jumps over the lazy dog. And then? It sleeps."
CHAT_TURN = "I am well.\nHuman: and you?"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FAMILY = "a family 👩‍👩‍👧 here 漢字 ok"
SCRIPTS = {
    1: HARD.encode(), 2: b"plain ASCII, all the way", 3: INVALID, 4: DOG.encode(), 5: CHAT_TURN.encode(),
    6: ALPHABET.encode(), 7: FAMILY.encode(),
}  # fmt: skip
STOPS = [
    (4, ["zy dog"]),
    (4, ["zy cat", "zy dog", "dog"]),
    (4, ["dog. And then? It sleeps well"]),
    (5, ["\nHuman:"]),
    (6, ["LMNOPQRS"]),
    (6, ["LMN", "LMNOPQRS"]),
    (6, ["LMNOPQRS", "MNO"]),
    (6, ["LMNOPQR?", "MNO"]),
    (6, ["XYZ!", "YZ"]),
    (6, ["A"]),
    (7, ["👧 h", "漢"]),
    (7, ["\u200d👧"]),
    (7, ["漢字"]),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Spy]]:
    with scripted_server(tiny_folder(tmp_path_factory.mktemp("scripted")), SCRIPTS) as pair:
        yield pair


def whole(url: str, body: dict) -> dict:
    response = httpx.post(url + TEXT, json={"temperature": 0, "max_tokens": 200} | body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(url: str, body: dict) -> tuple[dict[int, list[str]], dict[int, dict], dict]:
    """Per choice its pieces and its last chunk's choice; the usage."""
    body = {"temperature": 0, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}} | body
    *chunks, last, done = events(httpx.post(url + TEXT, json=body, timeout=60).text)
    assert done == "[DONE]"
    pieces: dict[int, list[str]] = {}
    ends: dict[int, dict] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        pieces.setdefault(choice["index"], []).append(choice["text"])
        if choice["finish_reason"] is not None:
            assert choice["index"] not in ends
            ends[choice["index"]] = choice
    return pieces, ends, last["usage"]


def test_d1_split_characters_of_interleaved_choices(bench: tuple[Live, Spy]) -> None:
    body = {"prompt": [[1], [2]], "n": 2}
    pieces, ends, usage = streamed(bench[0].url, body)
    texts = [HARD, HARD, SCRIPTS[2].decode(), SCRIPTS[2].decode()]
    assert ["".join(pieces[index]) for index in range(4)] == texts
    assert all("\ufffd" not in piece for index in range(4) for piece in pieces[index])
    assert max(map(len, pieces[2])) <= 3 and len(pieces[2]) > 8, "it comes piece by piece"
    answer = whole(bench[0].url, body)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert {end["finish_reason"] for end in ends.values()} == {"stop"} and answer["usage"] == usage
    assert usage["completion_tokens"] == 2 * (len(SCRIPTS[1]) + len(SCRIPTS[2]) + 2), "the end token counts"


@pytest.mark.parametrize("length", range(1, len(HARD.encode()) + 1))
def test_d1_cut_in_the_middle_of_a_character(bench: tuple[Live, Spy], length: int) -> None:
    expected = HARD.encode()[:length].decode("utf-8", "replace")
    body = {"prompt": [1], "max_tokens": length}
    pieces, ends, usage = streamed(bench[0].url, body)
    assert "".join(pieces[0]) == whole(bench[0].url, body)["choices"][0]["text"] == expected
    assert "\ufffd" not in "".join(pieces[0])[:-1] and expected.count("\ufffd") <= 1
    assert ends[0]["finish_reason"] == "length" and usage["completion_tokens"] == length


def test_d1_invalid_bytes(bench: tuple[Live, Spy]) -> None:
    pieces, _, _ = streamed(bench[0].url, {"prompt": [3]})
    expected = INVALID.decode("utf-8", "replace")
    assert "".join(pieces[0]) == whole(bench[0].url, {"prompt": [3]})["choices"][0]["text"] == expected
    assert any("A" in piece for piece in pieces[0][:4]), "what follows shows that they are invalid, and frees them"


@pytest.mark.parametrize(("key", "stops"), STOPS)
@pytest.mark.parametrize("include", [False, True])
def test_d2_stop_strings(bench: tuple[Live, Spy], key: int, stops: list[str], include: bool) -> None:
    server, spy = bench
    text = SCRIPTS[key].decode()
    found = min(((text.index(stop), len(stop), stop) for stop in stops if stop in text), default=None)
    expected = text if found is None else text[: found[0] + (found[1] if include else 0)]
    counted = len(text.encode()) + 1 if found is None else len((text[: found[0]] + found[2]).encode())
    body = {"prompt": [key], "stop": stops, "include_stop_str_in_output": include, "n": 2}
    pieces, ends, usage = streamed(server.url, body)
    answer = whole(server.url, body)
    for index in range(2):
        choice, shown = answer["choices"][index], ""
        for piece in pieces[index]:
            shown += piece
            assert expected.startswith(shown), "a part of a stop string leaked"
        assert shown == choice["text"] == expected
        stop = None if found is None else found[2]
        assert (choice["finish_reason"], ends[index]["finish_reason"]) == ("stop", "stop")
        assert choice.get("stop_reason") == ends[index].get("stop_reason") == (257 if stop is None else stop)
    assert usage == answer["usage"] and usage["completion_tokens"] == 2 * counted
    wait(lambda: spy.is_quiet)


def test_d2_the_engine_stops_with_the_string(bench: tuple[Live, Spy]) -> None:
    server, spy = bench
    known, aborted = len(spy.adds), len(spy.aborts)
    spy.hold(lambda request: request.num_output_tokens == 20)  # should the engine run ahead, it waits here
    connection = open_request(server.url, {"prompt": [4], "stop": ["quick"], "max_tokens": 60, "temperature": 0})
    wait(lambda: spy.aborts[aborted:] == spy.adds[known:] != [])
    spy.release.set()
    wait(lambda: spy.is_quiet)
    connection.settimeout(30)
    answer = b""
    while b'"text":"The "' not in answer:
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    connection.close()
    assert len("The quick") <= spy.tokens[spy.adds[known]] <= 21
    assert spy.ended[spy.adds[known]] == "abort"
