"""Chunks of plain text are encoded once and filled: byte for byte what encoding the whole chunk gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coterie.engine.messages import SamplingParams
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.answers import ChatChunk, Completion
from coterie.server.chat import ChatWriter
from coterie.server.completions import CompletionWriter
from coterie.server.formats import Tags
from coterie.server.generation import Event
from coterie.server.parsers import ParseRules
from coterie.server.reader import ChoiceReader, Reading
from coterie.server.streaming import Envelope, StreamWriter

TEXTS = ("a", 'say "x"\\', "\n\t\x00\x1f", "ďž漢 👩‍👩‍👧", "\u2028</script>", "\ufffd", "{}", '"\\u0000"')


def writers(thinking: Tags | None = None, **envelope: bool) -> list[tuple[StreamWriter, Any]]:
    made = Envelope("id-1", 5, 'a "model"\\', "fp", **envelope)
    job = SimpleNamespace(token_ids=[1, 2, 3], params=SamplingParams(n=2), text="")
    reading = Reading(ParseRules(thinking=thinking), "answer" if thinking is None else "open")
    call: Any = SimpleNamespace(envelope=made, job=job, jobs=[job, job], num_top=None, echo=False, reading=reading)
    call.request = SimpleNamespace(return_token_ids=None)
    call.reader = lambda: ChoiceReader(reading, None)
    return [(ChatWriter(call), ChatChunk), (CompletionWriter(call), Completion)]


@pytest.mark.parametrize("envelope", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage": True}])
def test_filled_chunks_are_whole_chunks(envelope: dict[str, bool]) -> None:
    for writer, kind in writers(**envelope):
        for number, text in enumerate(TEXTS * 2):
            index = number % 2
            (event,) = writer.write([Event(0, ChoiceDelta(index, text, (7,)))])
            assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
            chunk = msgspec.json.decode(event[6:], type=kind)
            assert event == writer.frame(chunk) == writer.frame(writer.delta(0, ChoiceDelta(index, text, (7,)))[0])
            (choice,) = chunk.choices
            shown = choice.delta.content if kind is ChatChunk else choice.text
            assert (choice.index, shown, choice.finish_reason) == (index, text, None)
            if envelope.get("continuous_usage"):
                assert chunk.usage.completion_tokens == number + 1
            else:
                assert chunk.usage is (None if envelope else msgspec.UNSET)


def test_what_must_be_read_is_not_filled() -> None:
    chat, _ = writers(thinking=Tags("<a>", "</a>"))[0]
    assert chat.plain(0, ChoiceDelta(0, "<a>why</a>so", (7,))) is None
    written = b"".join(chat.write([Event(0, ChoiceDelta(0, "<a>why</a>so", (7,)))]))
    assert b'"reasoning":"why"' in written and b"<a>" not in written


def test_choices_of_several_prompts_keep_their_index_and_ends_are_not_filled() -> None:
    for writer, kind in writers():
        for prompt, index in ((0, 0), (1, 1), (1, 0), (0, 1)):
            events = [Event(prompt, PromptInfo()), Event(prompt, ChoiceDelta(index, "t", (7,))),
                      Event(prompt, ChoiceDelta(index, "u", (8,), finish_reason="stop", stop_reason="v"))]  # fmt: skip
            frames = [msgspec.json.decode(frame[6:], type=kind) for frame in writer.write(events)]
            expected = 2 * prompt + index if kind is Completion else index
            texts = [chunk for chunk in frames if chunk.choices[0].index == expected]
            assert texts[-1].choices[0].finish_reason == "stop"
            assert texts[-1].choices[0].stop_reason == "v"
