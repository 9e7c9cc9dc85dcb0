"""Chat templates as models are released with them: which format is chosen, where an answer begins, and that the calls
a template writes are the calls that the parser reads. With vocabularies of released models, grammars as well.

They lie in the source archive of llama-cpp-python, which `make test` unpacks into the environment and does not build.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coterie.engine.grammar import Grammars
from coterie.engine.grammar_text import json_schema
from coterie.engine.tokenizer import Tokenizer
from coterie.model.gguf_file import read_gguf
from coterie.model.gguf_tokenizer import tokenizer_of
from coterie.server.config import ParserNames
from coterie.server.errors import ApiError
from coterie.server.formats import HERMES, Tool, choose_formats
from coterie.server.parsers import AnswerParser, ParseRules, start_of
from coterie.server.parts import Parsed
from coterie.server.prompts import ChatFields, chat_prompt
from coterie.server.protocol import Message
from coterie.server.templates import ChatTemplate, TemplateLimits

MODELS = Path(sys.prefix) / "llama-cpp-models"
TEMPLATES = sorted((MODELS / "templates").glob("*.jinja"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TEMPLATES, reason="make test unpacks the models folder of llama-cpp-python's archive"),
]
ARGUMENTS: dict[str, Any] = {"city": "Prag", "days": 3}
TOOLS: list[dict[str, Any]] = [{
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }},
}]  # fmt: skip
HELLO = [{"role": "user", "content": "hi"}]
CALL = {"id": "call12345", "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}  # fmt: skip
TURNS = [
    *HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "content": "sunny"},
]  # fmt: skip
FAMILIES = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", ["thinking", "thinking", "thinking"]),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", ["answer", "thinking", "answer"]),
    "llama-cpp-deepseek-r1": ("deepseek_v3", ["thinking", "thinking", "thinking"]),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", ["answer", "thinking", "answer"]),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", ["answer", "thinking", "answer"]),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", ["answer", "thinking", "answer"]),
    "Qwen-Qwen3-0.6B": ("hermes", ["open", "open", "answer"]),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ["answer", "answer", "answer"]),
    "Qwen3-Coder": ("qwen3_coder", ["answer", "answer", "answer"]),
    "Qwen3.5-4B": ("qwen3_coder", ["thinking", "thinking", "answer"]),
    "GLM-4.6": ("glm45", ["open", "open", "answer"]),
    "GLM-4.7-Flash": ("glm45", ["thinking", "thinking", "answer"]),
    "moonshotai-Kimi-K2": ("kimi_k2", ["answer", "answer", "answer"]),
}
UNUSABLE = {
    # They loop over tools that are null, or read a variable of their makers' own.
    "CohereForAI-c4ai-command-r-plus-tool_use", "fireworks-ai-llama-3-firefunction-v2",
    # No system messages: there is no place to tell of tools.
    "google-gemma-2-2b-it",
}  # fmt: skip


def opened(path: Path) -> tuple[ChatTemplate, Any]:
    source = path.read_text(encoding="utf-8")
    formats = choose_formats(source, ParserNames())
    limits = TemplateLimits(20.0, 1 << 22)
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, limits, formats.calls or HERMES), formats


def rendered(template: ChatTemplate, messages: Any, arguments: dict[str, Any] | None, tools: Any = None) -> str:
    fields = ChatFields(True, None, arguments, tools)
    return template.render_now(chat_prompt(msgspec.convert(messages, list[Message]), fields, 100))


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_and_where_answers_begin(name: str) -> None:
    template, formats = opened(MODELS / "templates" / f"{name}.jinja")
    form, starts = FAMILIES[name]
    assert formats.calls.name == form
    asked = (None, {"thinking": True}, {"enable_thinking": False})
    assert [start_of(rendered(template, HELLO, one), formats.thinking) for one in asked] == starts


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_calls_that_a_template_writes_are_read(path: Path) -> None:
    """What lies between the prompt without the call and its end is what the model would have said."""
    template, formats = opened(path)
    if path.stem in UNUSABLE:
        with pytest.raises(ApiError):
            rendered(template, TURNS, {"thinking": False}, TOOLS)
        return
    before = rendered(template, HELLO, {"thinking": False}, TOOLS)
    text = rendered(template, TURNS, {"thinking": False}, TOOLS)
    assert "get_weather" in before, "the model is told of its tools"
    assert "get_weather" in text.replace(before, ""), "and of the call"
    if template._style is not None and template._style.arguments != "content" and not formats.calls.is_written_by(
        path.read_text(encoding="utf-8")
    ):
        return  # a format of its own, which is not read
    same = next(i for i, pair in enumerate(zip(before + "\0", text, strict=False)) if pair[0] != pair[1])
    said = text[max(0, same - 12) :]
    tool = Tool("get_weather", TOOLS[0]["function"]["parameters"])
    rules = ParseRules(formats.thinking, formats.calls, {"get_weather": tool})
    found: list[Parsed] = []
    for pieces in ([said], list(said)):
        parser = AnswerParser(rules, "answer")
        result = Parsed()
        for piece in pieces:
            result.add(parser.push(piece))
        result.add(parser.finish())
        found.append(result)
    assert found[0].calls == found[1].calls and found[0].content == found[1].content
    (call,) = found[0].calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)


SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek-llm", "qwen2", "llama-spm"])
def test_grammars_on_released_vocabularies(name: str) -> None:
    path = MODELS / f"ggml-vocab-{name}.gguf"
    files = tokenizer_of(read_gguf(path).metadata, path.name)
    assert files is not None
    tokenizer = Tokenizer(files)
    assert tokenizer.eos_token_id is not None
    matcher = Grammars(tokenizer, (tokenizer.eos_token_id,), tokenizer.vocab_size).compile(json_schema(SCHEMA))
    text = json.dumps({"city": "Kiew 漢字", "days": 12}, ensure_ascii=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.decode(ids) != text or tokenizer.id_to_bytes(ids[0]).startswith(b" "):
        ids = tokenizer.encode("\x02" + text, add_special_tokens=False)[2:]  # without the blank of a first word
    for count, token in enumerate(ids):
        assert matcher.allowed()[token], tokenizer.decode(ids[:count])
        matcher.advance(ids[: count + 1], 0)
    assert np.flatnonzero(matcher.allowed()).tolist() == [tokenizer.eos_token_id]
