"""`generate` and `chat` on a scripted engine: what they ask of it, what they print, and how Ctrl-C ends an answer."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from coterie.cli import session
from coterie.cli.main import run
from coterie.engine.config import EngineConfig
from coterie.engine.launch import RunSpec
from coterie.engine.messages import Stats
from coterie.engine.output import ChoiceDelta, PromptInfo, RequestTimes
from coterie.spec.errors import CoterieError


class ByteTokenizer:
    """One token per byte; a leading 1 is the BOS."""

    chat_template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    bos_token, eos_token = "^", "$"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())


class ScriptedStream:
    """A stream of news with the engine's own times: first token after 0.25 s, the end after 1 s."""

    times = RequestTimes(arrival=10.0, first_token=10.25, finished=11.0)

    def __init__(self, news: AsyncGenerator) -> None:
        self._news = news
        self.aclose = news.aclose

    def __aiter__(self) -> AsyncGenerator:
        return self._news


class ScriptedEngine:
    """Stands where AsyncEngine stands: yields the scripted news, or hangs after the first piece when told to."""

    def __init__(self) -> None:
        self.model_name = "scripted"
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.config = EngineConfig()
        self.launched: list[tuple[object, EngineConfig]] = []
        self.asked: list[tuple[list[int], object]] = []
        self.closed = 0
        self.shut_down = 0
        self.interrupt_answer: int | None = None
        self.refuse_longer_than = 10_000
        self.pieces = [("Hel", (5, 6)), ("", (7,)), ("lo", (8,))]

    def launch(self, path: object, config: EngineConfig, *, run: RunSpec, progress: object = None) -> ScriptedEngine:
        assert run.parallel.is_single
        assert callable(progress)
        progress(50, 100)
        self.launched.append((path, config))
        return self

    def stats(self) -> Stats:
        seconds = {"attention": 0.25 * len(self.asked), "experts": 0.5}
        return Stats(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, seconds)

    def stream(self, prompt_token_ids, params, *, request_id=None):
        return ScriptedStream(self._stream(prompt_token_ids, params))

    async def _stream(self, prompt_token_ids, params):
        if len(prompt_token_ids) > self.refuse_longer_than:
            raise CoterieError("the prompt is longer than the context")
        self.asked.append((prompt_token_ids, params))
        try:
            yield PromptInfo(num_cached_tokens=2)
            for position, (text, token_ids) in enumerate(self.pieces):
                last = position == len(self.pieces) - 1
                yield ChoiceDelta(0, text, token_ids, finish_reason="stop" if last else None,
                                  stop_reason="lo" if last else None)  # fmt: skip
                if self.interrupt_answer == len(self.asked):
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def shutdown(self, *, drain: bool) -> None:
        assert drain is False
        self.shut_down += 1


@pytest.fixture
def engine(monkeypatch):
    scripted = ScriptedEngine()
    monkeypatch.setattr(session, "AsyncEngine", SimpleNamespace(launch=scripted.launch))
    yield scripted
    assert scripted.shut_down == len(scripted.launched)
    assert scripted.closed == len(scripted.asked)


def test_generate_json_is_one_object_with_ids_timings_and_stages(engine, capsys):
    flags = ["--temperature", "0", "--seed", "3", "--stop", "a", "--stop", "b", "--max-tokens", "9", "--ignore-eos"]
    assert run(["generate", "--prompt", "hé", *flags, "--page-size", "32", "--json"]) == 0
    shown = capsys.readouterr()
    value = json.loads(shown.out)
    assert value["prompt"] == "hé"
    assert value["prompt_ids"] == [1, *"hé".encode()]
    assert value["output_ids"] == [5, 6, 7, 8]
    assert (value["text"], value["finish_reason"], value["stop_reason"]) == ("Hello", "stop", "lo")
    assert value["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "cached_tokens": 2}
    timings = value["timings"]
    assert timings["stage_seconds"] == {"attention": 0.25, "experts": 0.0}
    assert 0 <= timings["ttft_seconds"] <= timings["total_seconds"]
    assert timings["decode_tokens_per_second"] == pytest.approx(3 / 0.75)
    assert timings["prompt_tokens_per_second"] > 0
    (asked,) = engine.asked
    assert asked[0] == value["prompt_ids"]
    params = asked[1]
    assert (params.temperature, params.seed, params.stop, params.max_tokens) == (0.0, 3, ("a", "b"), 9)
    assert params.ignore_eos is True
    assert engine.launched == [(None, EngineConfig(page_size=32))]


def test_generate_shows_text_ids_and_timings(engine, capsys):
    assert run(["generate", "--prompt-ids", "1, 2 ,3"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "Hello"
    assert lines[1].split() == ["prompt", "ids", "1,2,3"]
    assert lines[2].split() == ["output", "ids", "5,6,7,8"]
    assert lines[3] == "finish reason  stop ('lo')"
    assert len(lines) == 4, "the answer and what it consists of; how fast it came is an aside"
    assert "timings        3 tok in · 4 out · TTFT 0.25 s · 4.0 tok/s" in shown.err


def test_generate_without_tokenizer_takes_ids_only(engine, capsys):
    engine.tokenizer = None
    assert run(["generate", "--prompt", "hello"]) == 1
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert run(["generate", "--prompt-ids", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] is None


def test_without_a_tokenizer_nothing_is_loaded_for_a_text(engine, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    for verb in (["generate", str(tmp_path), "--prompt", "hello"], ["chat", str(tmp_path)]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        assert run(verb) == 1
        assert capsys.readouterr().err == (
            f"error: {tmp_path.name} has no tokenizer.json, so it reads no text; use generate --prompt-ids 1,2,3\n"
        )
    assert engine.launched == []


def test_a_prompt_from_stdin(engine, monkeypatch, capsys):
    for data, code in (("zwölf\n".encode(), 0), (b"\xff", 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert run(["generate", "--prompt-file", "-", "--json"]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["prompt"] == "zwölf\n"
    assert shown.err == "error: - is not UTF-8 text: invalid start byte at byte 0\n"


def test_prompt_file_is_read_as_text(engine, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_bytes("zwölf\n".encode())
    assert run(["generate", "--prompt-file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "zwölf\n"
    file.write_bytes(b"\xff\xfe\x00")
    assert run(["generate", "--prompt-file", str(file)]) == 1
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_failed_request_is_an_error_line(engine, capsys):
    engine.refuse_longer_than = 2
    assert run(["generate", "--prompt-ids", "1,2,3", "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: the prompt is longer than the context\n"
    assert shown.out == ""


def chat(monkeypatch, lines: str, *flags: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return run(["chat", *flags])


def test_chat_sends_the_whole_conversation_through_the_template(engine, monkeypatch, capsys):
    assert chat(monkeypatch, "a\nb\n", "--system", "s", "-n", "5") == 0
    assert [bytes(ids).decode() for ids, _ in engine.asked] == [
        "^<system>s<user>a",
        "^<system>s<user>a<assistant>Hello<user>b",
    ]
    shown = capsys.readouterr()
    assert shown.out == "Hello\nHello\n"
    assert shown.err.count("4 out · TTFT") == 2


def test_chat_goes_on_after_a_refused_turn_and_forgets_it(engine, monkeypatch, capsys):
    engine.refuse_longer_than = 20
    assert chat(monkeypatch, f"{'x' * 40}\nb\n") == 1
    assert [bytes(ids).decode() for ids, _ in engine.asked] == ["^<user>b"]
    assert "error: the prompt is longer than the context" in capsys.readouterr().err


def test_interrupt_stops_the_answer_and_the_conversation_goes_on(engine, monkeypatch, capsys):
    engine.interrupt_answer = 1
    assert chat(monkeypatch, "a\nb\n") == 0
    shown = capsys.readouterr()
    assert "stopped" in shown.err
    assert shown.out == "Hel\nHello\n"
    assert bytes(engine.asked[1][0]).decode() == "^<user>a<assistant>Hel<user>b"


def test_thoughts_are_shown_beside_the_answer_and_not_sent_back(engine, monkeypatch, capsys):
    engine.tokenizer.chat_template += "{# <think> #}"
    engine.pieces = [("<th", (5,)), ("ink>so", (6,)), (" so</thi", (7,)), ("nk>Hel", (8,)), ("lo <", (9,))]
    assert chat(monkeypatch, "hi\nagain\n") == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello <\nHello <\n", "what may have become a tag is given out at the end"
    assert shown.err.count("so so\n") == 2
    assert bytes(engine.asked[1][0]).decode() == "^<user>hi<assistant>Hello <<user>again"


def test_chat_without_any_stdin_ends_at_once(engine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["chat"]) == 0
    assert engine.asked == [] and "error" not in capsys.readouterr().err


def test_interrupt_of_generate_ends_the_program(engine, capsys):
    engine.interrupt_answer = 1
    assert run(["generate", "--prompt", "a"]) == 130
    assert capsys.readouterr().err.strip().endswith("error: interrupted")


def test_interrupt_at_the_prompt_leaves_without_an_error(engine, monkeypatch, capsys):
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", interrupted)
    assert run(["chat"]) == 0
    assert "error" not in capsys.readouterr().err
