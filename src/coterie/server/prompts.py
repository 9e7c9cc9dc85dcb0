"""From what a client sends to token ids: raw prompts by the tokenizer's rules, messages by the chat template.

One function for each, used by every route, so that /tokenize shows exactly what the engine will see. A rendered
template writes its own BOS and is encoded without special tokens; a raw prompt follows the tokenizer. No link is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.server.errors import ApiError, bad_request, not_supported
from coterie.server.protocol import ROLES, ContentPart, EarlierCall, Message
from coterie.server.state import ServedModel
from coterie.server.templates import ChatPrompt

_INLINE_CHARS = 4096
"""Texts up to this length are encoded at once, longer ones on a thread."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine sees it, and as an echo shows it."""

    text: str
    token_ids: list[int]


async def encode_text(model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise bad_request(f"{model.name} has no tokenizer: send token ids to /v1/completions", param="prompt")
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def encode_messages(model: ServedModel, prompt: ChatPrompt) -> EncodedPrompt:
    """A chat, ready for the answer."""
    if model.tokenizer is None:
        raise bad_request(f"{model.name} has no tokenizer: send token ids to /v1/completions", param="messages")
    text = await model.template.render(prompt)
    return EncodedPrompt(text, await encode_text(model, text, add_special_tokens=model.template.is_fallback))


async def encode_prompts(
    model: ServedModel, prompt: str | Sequence[str | int | list[int]], *, add_special_tokens: bool, max_prompts: int
) -> list[EncodedPrompt]:
    """The prompts of a completions request: one string, strings, one list of ids, or lists of ids."""
    items: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
    if set(map(type, items)) == {int}:
        items = [items]
    kinds = {type(item) for item in items}
    if len(kinds) > 1 or int in kinds:
        message = "prompt: mixed kinds; send a string, a list of strings, a list of token ids or a list of such lists"
        raise bad_request(message, param="prompt")
    if len(items) > max_prompts:
        message = f"prompt: {len(items)} prompts; one request may have {max_prompts} (--max-prompts)"
        raise bad_request(message, param="prompt")
    found = []
    for item in items:
        if isinstance(item, str):
            found.append(EncodedPrompt(item, await encode_text(model, item, add_special_tokens=add_special_tokens)))
        else:
            found.append(EncodedPrompt("", item))
    return found


def echo_text(model: ServedModel, prompt: EncodedPrompt) -> str:
    """What an echo shows: the text as it was sent, or the decoded ids."""
    if prompt.text or model.tokenizer is None:
        return prompt.text
    return model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ChatFields:
    """The fields of a chat or tokenize request that shape its prompt."""

    add_generation_prompt: bool | None
    reasoning_effort: str | None
    arguments: Mapping[str, Any] | None
    tools: list[dict[str, Any]] | None = None


def chat_prompt(messages: Sequence[Message], fields: ChatFields, max_messages: int) -> ChatPrompt:
    """Messages as a template reads them, or a 400 that names the message at fault."""
    if len(messages) > max_messages:
        message = f"messages: {len(messages)} messages; at most {max_messages} are accepted (--max-messages)"
        raise bad_request(message, param="messages")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return ChatPrompt(plain, fields.add_generation_prompt is not False, _arguments(fields), fields.tools)


def _arguments(fields: ChatFields) -> dict[str, Any]:
    """What the template is told beside the messages. Families call the switch of thinking `thinking` or
    `enable_thinking`: either one sets both, and so does an effort."""
    arguments = dict(fields.arguments or {})
    if fields.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", fields.reasoning_effort)
    switch = arguments.get("thinking", arguments.get("enable_thinking"))
    if switch is None and fields.reasoning_effort is not None:
        switch = fields.reasoning_effort != "none"
    if switch is not None:
        arguments.setdefault("thinking", switch)
        arguments.setdefault("enable_thinking", switch)
    return arguments


def _plain(message: Message, where: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise bad_request(f"{where}.role: {message.role[:50]!r} is not one of {known}", param=f"{where}.role")
    content = message.content
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if content is None and not (role == "assistant" and (message.tool_calls or reasoning)):
        raise bad_request(f"{where}.content: a string or a list of text parts is required", param=f"{where}.content")
    plain: dict[str, Any] = {"role": role, "content": _text(content, where)}
    optional = {
        "name": message.name,
        "reasoning_content": reasoning,
        "tool_calls": [_earlier_call(call) for call in message.tool_calls] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
    }
    return plain | {key: value for key, value in optional.items() if value is not None}


def _earlier_call(call: EarlierCall) -> dict[str, Any]:
    """A call with its arguments as JSON text; the template gets them as it wants them (`server.call_style`)."""
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": text}
    return {"id": call.id or "call_0", "type": "function", "function": function}


def _text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, where: str) -> str:
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise _no_such_part(part, where)
    field = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, field)
    if text is None:
        raise bad_request(f"{where}.{field}: a string is required", param=f"{where}.{field}")
    return text


def _no_such_part(part: ContentPart, where: str) -> ApiError:
    message = f"parts of type {part.type[:50]!r} are not supported; this server reads text only and fetches nothing"
    return not_supported(where, message)
