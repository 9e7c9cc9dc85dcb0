"""How a chat template wants the calls of earlier turns: arguments as JSON text or an object, content null or empty.

Templates differ and do not say, so the first chat with calls asks: a made-up conversation is rendered in each style,
and the first that shows the call whole is the template's. One that shows none gets the calls as text in the content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from coterie.server.errors import ApiError, bad_request
from coterie.server.formats import Call, ToolFormat
from coterie.server.tools import written

Message = dict[str, Any]
_ARGUMENTS = {"probe_key": "probe_value"}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """`arguments`: "text", "object", or "content" for a template that knows no calls. `null_content`: a message
    without text has content null, not the empty string."""

    arguments: Literal["text", "object", "content"]
    null_content: bool


def probe(render: Callable[[list[Message]], str]) -> CallStyle:
    """The style that a template shows calls in. `render` may raise ApiError."""
    for arguments in ("text", "object"):
        for null_content in (True, False):
            style = CallStyle(arguments, null_content)
            call = {"name": "probe_name", "arguments": json.dumps(_ARGUMENTS)}
            turn: Message = {
                "role": "assistant", "content": "",
                "tool_calls": [{"id": "call_0000", "type": "function", "function": call}],
            }  # fmt: skip
            messages: list[Message] = [
                {"role": "user", "content": "probe"}, turn,
                {"role": "tool", "tool_call_id": "call_0000", "name": "probe_name", "content": "probe"},
            ]  # fmt: skip
            try:
                text = render([_in_style(message, style) for message in messages])
            except ApiError:
                continue
            if _shows(text, style):
                return style
    return CallStyle("content", False)


def _shows(text: str, style: CallStyle) -> bool:
    """Whether name and arguments are there, and neither a null nor a text that was quoted once more."""
    if "probe_name" not in text or "None" in text or '\\"probe_key' in text:
        return False
    whole = json.dumps(_ARGUMENTS)
    return whole in text if style.arguments == "text" else "probe_key" in text and "probe_value" in text


def laid_out(messages: Sequence[Message], style: CallStyle, form: ToolFormat) -> list[Message]:
    """Messages with their calls as the template wants them. Raises ApiError for arguments that are no JSON object."""
    if style.arguments == "content":
        return _as_content(messages, form)
    return [_in_style(message, style, f"messages[{i}]") for i, message in enumerate(messages)]


def _in_style(message: Message, style: CallStyle, where: str = "") -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if style.arguments == "object":
        calls = [
            {**call, "function": {**call["function"], "arguments": _object(call, f"{where}.tool_calls[{i}]")}}
            for i, call in enumerate(calls)
        ]
    content = None if style.null_content and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _object(call: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(call["function"]["arguments"] or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        param = f"{where}.function.arguments"
        raise bad_request(f"{param}: the text is not a JSON object, which this model needs", param=param) from error


def _as_content(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """Calls and their results as text: results are what the user says next."""
    found: list[Message] = []
    results = False
    for message in messages:
        text, follows = message["content"], results
        results = message["role"] in ("tool", "function")
        if results:
            text = f"<tool_response>\n{text}\n</tool_response>"
            if follows:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [
                Call(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
            ]
            parts = [text, written(form, calls)]
            found.append({"role": message["role"], "content": "\n".join(part for part in parts if part)})
        else:
            found.append(message)
    return found
