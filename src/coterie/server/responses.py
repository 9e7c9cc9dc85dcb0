"""POST /v1/responses: a chat in another envelope, without memory. The request becomes a ChatRequest and the chat path
does the rest, so both routes see the same ids and say the same text; the answer and its stream are made of the chat's.

Not here: templates, sampling, the run, or anything that a chat refuses. Errors name the fields of this API.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import Struct

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.answers import ChatChunk, ChatDelta, ChatLogprobs, ErrorDetail, Usage
from coterie.server.chat import ChatCall, ChatGatherer, ChatWriter, prepare_chat
from coterie.server.errors import ApiError, Fault, bad_request, not_supported
from coterie.server.gathering import Gatherer
from coterie.server.generation import Event, PromptJob
from coterie.server.protocol import (
    ChatRequest,
    EarlierCall,
    EarlierFunction,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    SamplingFields,
)
from coterie.server.responses_protocol import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
    FunctionCallItem,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    ItemEvent,
    OutputItem,
    OutputLogprob,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningItem,
    ReasoningOptions,
    ReasoningText,
    ResponseBody,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
    TextFormat,
    TextOptions,
)
from coterie.server.state import ServedModel, ServerState
from coterie.server.streaming import Envelope, StreamWriter, frame
from coterie.server.turns import EncodedList

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
        return names if self.request.max_output_tokens is None else names | {"max_tokens": "max_output_tokens"}

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


class ResponsesGatherer(Gatherer):
    """Gathers the whole answer: thoughts, the message, calls, as far as there are any."""

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__(len(call.chat.job.token_ids))
        self._response, self._chat = call, ChatGatherer(call.chat)

    def take(self, event: Event) -> Iterator[int]:
        """The chat's."""
        self._chat.tally.add(event)
        return self._chat.take(event)

    def answer(self) -> ResponseBody:
        """The chat's only choice as items."""
        answer = self._chat.answer()
        choice = answer.choices[0]
        message, status = choice.message, _Ended(choice.finish_reason).status
        items = _Items(self._response)
        if message.reasoning_content:
            ends = not message.content and not message.tool_calls
            items.add(items.reasoning(message.reasoning_content, status if ends else "completed"))
        if message.content or not (message.reasoning_content or message.tool_calls):
            logprobs: Any = [] if choice.logprobs is None else choice.logprobs.content
            items.add(items.message([OutputText(text=message.content or "", logprobs=logprobs)], status))
        for made in message.tool_calls or ():
            items.add(items.call(made.id, made.function.name, made.function.arguments))
        return _body(self._response, status, items.done, answer.usage)


class _Items:
    """The items of a response's output, in order. `done` are those that are complete."""

    def __init__(self, call: ResponsesCall) -> None:
        self._suffix = call.envelope.id.removeprefix("resp_")
        self.done: list[OutputItem] = []

    def add(self, item: OutputItem) -> None:
        self.done.append(item)

    def name(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{self._suffix}" + (f"_{len(self.done)}" if self.done else "")

    def message(self, content: list[OutputText], status: Any) -> OutputMessage:
        return OutputMessage(id=self.name("msg"), status=status, content=content)

    def reasoning(self, text: str | None, status: Any) -> ReasoningItem:
        content = [] if text is None else [ReasoningText(text=text)]
        return ReasoningItem(id=self.name("rs"), status=status, content=content)

    def call(self, call_id: str, name: str, arguments: str, status: Any = "completed") -> FunctionCallItem:
        return FunctionCallItem(
            id=self.name("fc"), status=status, call_id=call_id, name=name, arguments=arguments
        )


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a chat's finish_reason is said here."""

    finish_reason: str

    @property
    def status(self) -> Any:
        return "incomplete" if self.finish_reason == "length" else "completed"


def _body(
    call: ResponsesCall,
    status: Any,
    output: list[OutputItem],
    usage: Usage | None = None,
    error: ErrorDetail | None = None,
) -> ResponseBody:
    request, params, envelope = call.request, call.chat.job.params, call.envelope
    text = request.text or TextOptions()
    return ResponseBody(
        id=envelope.id,
        created_at=envelope.created,
        status=status,
        completed_at=int(time.time()) if status == "completed" else None,
        error=error,
        incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=envelope.model,
        output=output,
        reasoning=request.reasoning or ReasoningOptions(),
        service_tier=envelope.service_tier,
        temperature=params.temperature,
        text=TextOptions(format=text.format or TextFormat(), verbosity=text.verbosity),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        usage=None if usage is None else _usage(usage),
    )


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _logprobs(logprobs: ChatLogprobs | None) -> list[OutputLogprob]:
    if logprobs is None:
        return []
    return [OutputLogprob(entry.token, entry.logprob, entry.bytes, entry.top_logprobs) for entry in logprobs.content]


class ResponsesWriter(StreamWriter):
    """Turns a chat's chunks into this API's events: created, in_progress, each item with its parts, deltas and ends.

    Thoughts and the message are open while their text comes; a call is complete when it comes. Events carry their own
    names and numbers, and there is no [DONE].
    """

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__(call.envelope, len(call.chat.job.token_ids))
        self._call = call
        self._chat = ChatWriter(call.chat)
        self._items = _Items(call)
        self._open: Literal["message", "reasoning"] | None = None
        self._call_id = self._name = ""
        self._number = 0
        self._text: list[str] = []
        self._logprobs = EncodedList()
        self._finish_reason = ""

    def prompt(self, index: int, info: PromptInfo) -> list[Struct]:
        """The response so far; with it the message, if nothing else can come before it."""
        begun = _body(self._call, "in_progress", [])
        found = [
            self._numbered(ResponseEvent, type="response.created", response=begun),
            self._numbered(ResponseEvent, type="response.in_progress", response=begun),
        ]
        return [*found, *self._begin("message")] if self._call.chat.reading.is_plain else found

    def delta(self, index: int, delta: ChoiceDelta) -> list[Struct]:
        """What a delta adds to the items, and the ends of those that are complete."""
        found: list[Struct] = []
        for chunk in self._chat.delta(index, delta):
            assert isinstance(chunk, ChatChunk)
            for choice in chunk.choices:
                found += self._choice(choice.delta, _logprobs(choice.logprobs))
                if choice.finish_reason is not None:
                    self._finish_reason = choice.finish_reason
                    if self._open is None and not self._items.done:
                        found += self._begin("message")
                    found += self._finish()
        self.tally.reasoning = self._chat.tally.reasoning
        return found

    def last(self, usage: Usage) -> Struct:
        """The whole response."""
        status = _Ended(self._finish_reason).status
        body = _body(self._call, status, self._items.done, usage)
        return self._numbered(ResponseEvent, type=f"response.{status}", response=body)

    def frame(self, event: Struct) -> bytes:
        """An event with its name."""
        return b"event: %b\n%b" % (event.type.encode(), frame(event))  # type: ignore[attr-defined]

    def end(self) -> bytes:
        """The whole response, always."""
        return self.frame(self.last(self.tally.usage()))

    def failure(self, fault: Fault) -> bytes:
        """The response as failed, then the error, which clients raise."""
        detail = fault.detail()
        failed = self._numbered(
            ResponseEvent, type="response.failed", response=_body(self._call, "failed", [], error=detail)
        )
        error = self._numbered(
            ErrorEvent, message=fault.message, code=fault.code or fault.kind, param=fault.param, error=detail
        )
        return self.frame(failed) + self.frame(error)

    def _choice(self, delta: ChatDelta, logprobs: list[OutputLogprob]) -> list[Struct]:
        found: list[Struct] = []
        if delta.reasoning_content:
            found += self._begin("reasoning")
            self._text.append(delta.reasoning_content)
            found.append(self._inside(ReasoningDeltaEvent, delta=delta.reasoning_content))
        elif delta.content or (logprobs and not delta.tool_calls):
            found += self._begin("message")
            self._text.append(delta.content or "")
            self._logprobs.extend(logprobs)
            found.append(self._inside(TextDeltaEvent, delta=delta.content or "", logprobs=logprobs))
        for made in delta.tool_calls or ():
            if made.id:
                found += self._finish()
                self._call_id, self._name = made.id, made.function.name or ""
            elif made.function.arguments:
                found += self._function_call(made.function.arguments)
        return found

    def _function_call(self, arguments: str) -> list[Struct]:
        empty = self._items.call(self._call_id, self._name, "", "in_progress")
        whole = self._items.call(self._call_id, self._name, arguments)
        place: dict[str, Any] = {"item_id": whole.id, "output_index": len(self._items.done)}
        found = [
            self._item("added", empty),
            self._numbered(ArgumentsDeltaEvent, delta=arguments, **place),
            self._numbered(ArgumentsDoneEvent, name=self._name, arguments=arguments, **place),
            self._item("done", whole),
        ]
        self._items.add(whole)
        return found

    def _begin(self, kind: Literal["message", "reasoning"]) -> list[Struct]:
        """Open an item for text, unless it is open; another one ends before it."""
        if self._open == kind:
            return []
        found = self._finish()
        self._open = kind
        if kind == "message":
            return [*found, self._item("added", self._items.message([], "in_progress")),
                    self._part("added", OutputText(text=""))]  # fmt: skip
        return [*found, self._item("added", self._items.reasoning(None, "in_progress")),
                self._part("added", ReasoningText(text=""))]  # fmt: skip

    def _finish(self) -> list[Struct]:
        """The ends of the item that is open."""
        if self._open is None:
            return []
        text, status = "".join(self._text), _Ended(self._finish_reason).status
        part: OutputText | ReasoningText = ReasoningText(text=text)
        item: OutputItem = self._items.reasoning(text, status)
        if self._open == "message":
            part = OutputText(text=text, logprobs=self._logprobs.json)
            item = self._items.message([part], status)
            ended = self._inside(TextDoneEvent, text=text, logprobs=self._logprobs.json)
        else:
            ended = self._inside(ReasoningDoneEvent, text=text)
        found = [ended, self._part("done", part), self._item("done", item)]
        self._items.add(item)
        self._open, self._text, self._logprobs = None, [], EncodedList()
        return found

    def _item(self, news: str, item: OutputItem) -> Struct:
        place = len(self._items.done)
        return self._numbered(ItemEvent, type=f"response.output_item.{news}", output_index=place, item=item)

    def _part(self, news: str, part: OutputText | ReasoningText) -> Struct:
        return self._inside(PartEvent, type=f"response.content_part.{news}", part=part)

    def _inside(self, kind: Callable[..., Struct], **values: Any) -> Struct:
        """An event of the open item's part."""
        name = self._items.name("msg" if self._open == "message" else "rs")
        return self._numbered(kind, item_id=name, output_index=len(self._items.done), content_index=0, **values)

    def _numbered(self, kind: Callable[..., Struct], **values: Any) -> Struct:
        self._number += 1
        return kind(sequence_number=self._number - 1, **values)
