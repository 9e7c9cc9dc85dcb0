"""Text from tokens: split characters, stop strings at every split, and the tokens that leave with the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_tokenizer, sentencepiece_tokenizer, word_tokenizer

from coterie.engine.detokenizer import ChoiceText, IncrementalDetokenizer, ShownText, StopChecker
from coterie.engine.messages import SamplingParams, TokenLogprob
from coterie.engine.tokenizer import Tokenizer

HARD_TEXT = "ď👩‍👩‍👧漢 ا\u200dé"
DOG = "The quick brown fox jumps over the lazy dog."
STOPS = [
    (DOG, ("zy dog",)),
    ("I am well.\nHuman: and you?", ("\nHuman:",)),
    ("ABCDEFGHIJKLMNOPQRSTUVW", ("LMNOPQRS",)),
    ("ABCDEFGHIJKLMNOPQRSTUVW", ("LMN", "LMNOPQRS")),
    ("ABCDEFGHIJKLMNOPQRSTUVW", ("LMNOPQRS", "MNO")),
    ("ABCDEFGHIJKLMNOPQR?TUVW", ("LMNOPQRS", "MNO")),
    ("a family 👩‍👩‍👧 here 漢字", ("👧 h", "漢")),
    ("a family 👩‍👩‍👧", ("\u200d👧",)),
    ("aaaab", ("aab", "b")),
    ("nothing stops this", ("zzz", "this!")),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, said once more and slowly: the match that starts first; of several there, the shortest."""
    found = [(text.index(stop), len(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[0]], min(found)[2]) if found else (text, None)


def byte_ids(data: bytes) -> list[int]:
    """The byte tokenizer's id of a byte is the byte."""
    return list(data)


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


def test_split_characters_are_held_back_per_choice(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD_TEXT)
    assert len(ids) == len(HARD_TEXT.encode())
    first, second = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    a, b = [], []
    for one, other in zip(ids, reversed(byte_ids(b"ABC" * 20)), strict=False):
        a.append(first.push(one))
        b.append(second.push(other))
    assert "".join(a) + first.flush() == HARD_TEXT
    assert "\ufffd" not in "".join(a) + "".join(b)


@pytest.mark.parametrize("length", range(1, len(HARD_TEXT.encode())))
def test_cut_mid_character_gives_one_replacement(tokenizer: Tokenizer, length: int) -> None:
    ids = byte_ids(HARD_TEXT.encode()[:length])
    pieces = stream(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces[:-1]) == HARD_TEXT.encode()[:length].decode("utf-8", "ignore")
    assert pieces[-1] in ("", "\ufffd")


def test_invalid_bytes_flush_with_the_next_character(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(i) for i in b"\xe6\xbcA\xffB"] == ["", "", "\ufffdA", "\ufffd", "B"]


@given(st.binary(max_size=40))
def test_deltas_are_the_whole_decode(tokenizer: Tokenizer, data: bytes) -> None:
    ids = byte_ids(data)
    assert "".join(stream(IncrementalDetokenizer(tokenizer), ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_special_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    ids = [*byte_ids(b"a"), end, *byte_ids(b"b")]
    assert "".join(stream(IncrementalDetokenizer(tokenizer), ids)) == "ab" == tokenizer.decode(ids)
    shown = "".join(stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ids))
    assert shown == "a<|end|>b" == tokenizer.decode(ids, skip_special_tokens=False)


def test_sentencepiece_keeps_the_space_of_a_continuation(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer(sentencepiece_tokenizer(tmp_path_factory.mktemp("sp")))
    assert tokenizer.form == "sentencepiece"
    ids = [tokenizer.token_id(t) or 0 for t in ("▁hello", "▁world", "<0xE6>", "<0xBC>", "<0xA2>")]
    assert tokenizer.decode(ids) == "hello world漢"
    assert stream(IncrementalDetokenizer(tokenizer), ids) == [" hello", " world", "", "", "漢", ""]


def test_other_decoders_ask_the_library(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer(word_tokenizer(tmp_path_factory.mktemp("words")))
    assert tokenizer.form == "other"
    ids = tokenizer.encode("one two three two one")
    pieces = stream(IncrementalDetokenizer(tokenizer), ids)
    assert pieces[:3] == ["one", " two", " three"]
    assert "".join(pieces) == tokenizer.decode(ids) == "one two three two one"


@pytest.mark.parametrize(("text", "stops"), STOPS)
def test_stop_at_every_split(text: str, stops: tuple[str, ...]) -> None:
    expected, expected_stop = cut(text, stops)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            checker = StopChecker(stops)
            shown, match = "", None
            for piece in (text[:first], text[first:second], text[second:]):
                more, match = checker.push(piece)
                shown += more
                assert expected.startswith(shown), "a piece of the stop string leaked"
                if match is not None:
                    break
            if match is None:
                more, match = checker.flush()
                shown += more
            assert (shown, match and match.stop) == (expected, expected_stop)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_rule_does_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    checker = StopChecker(tuple(stops))
    shown, match, rest = "", None, text
    while rest and match is None:
        size = data.draw(st.integers(1, len(rest)))
        more, match = checker.push(rest[:size])
        shown, rest = shown + more, rest[size:]
    if match is None:
        more, match = checker.flush()
        shown += more
    assert (shown, match and match.stop) == cut(text, tuple(stops))


def test_only_a_possible_stop_is_held() -> None:
    checker = StopChecker(("zy dog", "\nHuman:"))
    assert checker.push("the lazy") == ("the la", None)
    assert checker.push(" d") == ("", None)
    assert checker.push("ay") == ("zy day", None)


def run(text: ChoiceText, steps: list[list[int]], *, by_token: bool = False) -> ShownText:
    """Feed steps, the last through `finish`; join what was shown."""
    shown, ids, logprobs = "", (), ()
    for number, step in enumerate(steps):
        values = [[TokenLogprob(i, -1.0, 1)] for i in step]
        last = number == len(steps) - 1
        got = text.finish(step, values, by_token=by_token) if last else text.push(step, values)
        shown, ids, logprobs = shown + got.text, ids + got.token_ids, logprobs + (got.logprobs or ())
        if got.stop is not None:
            return ShownText(shown, ids, logprobs, got.stop)
    return ShownText(shown, ids, logprobs)


@pytest.mark.parametrize(("text", "stops"), STOPS)
@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_choice_counts_tokens_to_the_stop(tokenizer: Tokenizer, text: str, stops: tuple[str, ...], step: int) -> None:
    ids = byte_ids(text.encode())
    steps = [ids[i : i + step] for i in range(0, len(ids), step)]
    params = SamplingParams(stop=stops, logprobs=0)
    expected, stop = cut(text, stops)
    counted = len((expected + (stop or "")).encode())
    got = run(ChoiceText(tokenizer, params), steps)
    assert (got.text, got.stop) == (expected, stop)
    assert got.token_ids == tuple(ids[:counted])
    assert got.logprobs is not None and [entry[0].token_id for entry in got.logprobs] == ids[:counted]


def test_include_stop_string(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("zy dog",), include_stop_str_in_output=True)
    got = run(ChoiceText(tokenizer, params), [[i] for i in DOG.encode()])
    assert got.text == DOG[:-1] and got.stop == "zy dog"


def test_stop_token_counts_but_is_no_text(tokenizer: Tokenizer) -> None:
    ids = byte_ids(b"ab!")
    for include, text in ((False, "ab"), (True, "ab!")):
        params = SamplingParams(stop=("b?",), include_stop_str_in_output=include)
        got = run(ChoiceText(tokenizer, params), [[i] for i in ids], by_token=True)
        assert (got.text, got.token_ids, got.stop) == (text, tuple(ids), None)


def test_held_character_at_the_end_is_one_replacement(tokenizer: Tokenizer) -> None:
    ids = byte_ids("漢👧".encode()[:-1])
    got = run(ChoiceText(tokenizer, SamplingParams(stop=("👧!",))), [[i] for i in ids])
    assert got.text == "漢\ufffd" and got.token_ids == tuple(ids)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    got = run(ChoiceText(tokenizer, SamplingParams(stop=("ab",), min_tokens=3)), [[i] for i in b"ababab"])
    assert got.text == "abab" and got.stop == "ab" and len(got.token_ids) == 6


def test_without_a_tokenizer_tokens_pass_and_text_is_empty() -> None:
    got = run(ChoiceText(None, SamplingParams()), [[5], [6, 7], [8]], by_token=True)
    assert (got.text, got.token_ids, got.logprobs) == ("", (5, 6, 7, 8), ())
