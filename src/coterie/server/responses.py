"""POST /v1/responses: a chat in another envelope, without memory. The request becomes a ChatRequest and the chat path
does the rest, so both routes see the same ids and say the same text.

Not here: templates, sampling, the run, or anything that a chat refuses; the answer (`server.responses_answer`). Errors
name the fields of this API.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.server.chat import ChatCall, prepare_chat
from coterie.server.errors import ApiError, Fault, bad_request, not_supported
from coterie.server.gathering import Gatherer
from coterie.server.generation import PromptJob
from coterie.server.protocol import (
    ChatRequest,
    EarlierCall,
    EarlierFunction,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    SamplingFields,
)
from coterie.server.responses_answer import ResponsesGatherer, ResponsesWriter
from coterie.server.responses_protocol import InputItem, ResponsesRequest, TextFormat
from coterie.server.sampling import asked_length
from coterie.server.state import ServedModel, ServerState
from coterie.server.streaming import Envelope, StreamWriter

LOGPROBS = "message.output_text.logprobs"
"""In `include`, it asks for log-probabilities; so does a number of `top_logprobs`."""

_STORED = ("previous_response_id", "conversation", "prompt", "background")
_FORMAT = re.compile(r"^response_format(?:\.json_schema)?")
_CHAT_NAME = re.compile(rf"^messages(?:\[(\d+)\])?|^(tools\[\d+\]|tool_choice)\.function|{_FORMAT.pattern}")


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A response that is ready to run: the chat it is made of."""

    request: ResponsesRequest
    chat: ChatCall

    @property
    def envelope(self) -> Envelope:
        """The chat's."""
        return self.chat.envelope

    @property
    def jobs(self) -> list[PromptJob]:
        """The chat's."""
        return self.chat.jobs

    @property
    def names(self) -> dict[str, str]:
        """The client's names of the engine's fields, where they differ."""
        names = {field: _FORMAT.sub("text.format", name) for field, name in self.chat.names.items()}
        names["prompt"] = "input"
        is_own = self.request.max_output_tokens is not None or asked_length(self.request) is None
        return names | {"max_tokens": "max_output_tokens"} if is_own else names

    def writer(self) -> StreamWriter:
        """For the streamed form."""
        return ResponsesWriter(self)

    def gatherer(self) -> Gatherer:
        """For the whole form."""
        return ResponsesGatherer(self)


async def prepare_responses(state: ServerState, model: ServedModel, request: ResponsesRequest) -> ResponsesCall:
    """Translate the request into a chat and prepare that. Raises ApiError naming the field of this API."""
    for name in _STORED:
        if getattr(request, name):
            raise not_supported(name, "this server keeps no responses; send the whole conversation as input")
    if request.n not in (None, 1):
        raise not_supported("n", "a response has one choice; leave it out")
    for value in set(request.include or ()) - {LOGPROBS}:
        state.unknown.judge(f"value {value[:64]!r} of include", "include")
    messages, places = to_messages(request)
    chat = _to_chat(request, messages)
    try:
        return ResponsesCall(request, await prepare_chat(state, model, chat, "resp_"))
    except ApiError as error:
        raise ApiError(_in_our_words(error.fault, places)) from error


def _to_chat(request: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    fields: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.truncation == "auto" and request.truncate_prompt_tokens is None:
        fields["truncate_prompt_tokens"] = -1
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _response_format(request.text.format)
    return ChatRequest(
        **fields,
        messages=messages,
        logprobs=LOGPROBS in (request.include or ()) or bool(request.top_logprobs),
        top_logprobs=request.top_logprobs,
        tools=None if request.tools is None else [_tool(tool, i) for i, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _response_format(wanted: TextFormat) -> ResponseFormat:
    """The format as chats ask for it, where the schema lies one level deeper."""
    if wanted.type != "json_schema" or wanted.schema is None:
        return ResponseFormat(wanted.type)
    return ResponseFormat(wanted.type, JsonSchemaFormat(name=wanted.name or "answer", schema=wanted.schema))


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """A function as chats declare it, one level deeper; what the server would have to run itself is refused."""
    if tool.get("type") != "function":
        raise not_supported(f"tools[{index}]", f"tools of type {str(tool.get('type'))[:50]!r} are not run here")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def to_messages(request: ResponsesRequest) -> tuple[list[Message], list[str]]:
    """The messages of a chat, and for each where the client wrote it. Function calls of one turn are one message."""
    messages: list[Message] = []
    places: list[str] = []
    if request.instructions is not None:
        messages.append(Message(role="system", content=request.instructions))
        places.append("instructions")
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)], [*places, "input"]
    calls: list[EarlierCall] = []
    for i, item in enumerate(request.input):
        where = f"input[{i}]"
        if item.type == "reasoning":
            continue  # templates leave earlier turns' reasoning out
        if item.type == "function_call":
            if not calls:
                messages.append(Message(role="assistant", tool_calls=calls))
                places.append(where)
            calls.append(_call(item, where))
            continue
        calls = []
        messages.append(_message(item, where))
        places.append(where)
    if not messages:
        raise bad_request("input: at least one message is required", param="input")
    return messages, places


def _call(item: InputItem, where: str) -> EarlierCall:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise bad_request(f"{where}.{name}: a string is required", param=f"{where}.{name}")
    return EarlierCall(id=item.call_id, function=EarlierFunction(item.name or "", item.arguments))


def _message(item: InputItem, where: str) -> Message:
    if item.type == "function_call_output":
        if item.output is None:
            message = f"{where}.output: a string or a list of text parts is required"
            raise bad_request(message, param=f"{where}.output")
        return Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if item.type not in (None, "message"):
        raise not_supported(where, f"items of type {item.type[:50]!r} are not supported")
    if item.role is None:
        raise bad_request(f"{where}.role: this field is required", param=f"{where}.role")
    return Message(role=item.role, content=item.content)


def _in_our_words(fault: Fault, places: Sequence[str]) -> Fault:
    """A fault of the chat with the names that the client of this API used."""

    def name(found: re.Match[str]) -> str:
        if found[0].startswith("response_format"):
            return "text.format"
        if found[2] is not None:
            return found[2]
        return "input" if found[1] is None else places[int(found[1])]

    param = None if fault.param is None else _CHAT_NAME.sub(name, fault.param)
    return replace(fault, param=param, message=_CHAT_NAME.sub(name, fault.message))
