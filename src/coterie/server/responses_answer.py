"""Answers of POST /v1/responses: output items that grow part by part, told as events or gathered as one body.

`Output` is the one place where items are made, so a whole answer holds what a stream's last event would: the same
items in the same order. They differ only where a stream cannot take back what it has told (`server.parts`: broken,
reassigned). Not here: the request (`server.responses`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.answers import ChatTokenLogprob, ErrorDetail, Usage
from coterie.server.errors import Fault
from coterie.server.gathering import Gatherer
from coterie.server.generation import Event
from coterie.server.logprobs import chat_logprobs
from coterie.server.parts import Parsed, Part, Segment
from coterie.server.reader import call_id
from coterie.server.responses_protocol import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    OutputItem,
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
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
    TextFormat,
    TextOptions,
)
from coterie.server.streaming import StreamWriter, frame
from coterie.server.turns import EncodedList, pieces

if TYPE_CHECKING:
    from coterie.server.responses import ResponsesCall

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


def _status(finish_reason: str | None) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish_reason == "length" else "completed"


class Output:
    """A response's items. `done`: those that are complete. `number`: the next event's."""

    def __init__(self, response_id: str) -> None:
        self._suffix = response_id.removeprefix("resp_")
        self.done: list[OutputItem] = []
        self.number = 0
        self._open: Segment | None = None

    @property
    def kind(self) -> Literal["content", "reasoning", "call"] | None:
        """Of the item that is open."""
        return None if self._open is None else self._open.kind

    def take(self, part: Part, logprobs: EncodedList) -> list[Struct]:
        """Add a part; return the events that tell of it. `logprobs` go with content."""
        match part.kind:
            case "content" | "reasoning":
                return self.text(part.kind, part.text, logprobs)
            case "begun":
                return self._begin(Segment("call", name=part.name, id=part.id or call_id()))
            case "arguments":
                self._opened.pieces.append(part.text)
                return [self._placed(ArgumentsDeltaEvent, delta=part.text)]
            case "called":
                return self.close("completed")
            case "broken" if self.kind == "call":
                return self.close("incomplete")
        return []

    def text(self, kind: Literal["content", "reasoning"], text: str, logprobs: EncodedList) -> list[Struct]:
        """Add text to the item of its kind."""
        found = [] if self.kind == kind else self._begin(Segment(kind))
        if not text and not logprobs:
            return found
        self._opened.pieces.append(text)
        if kind == "reasoning":
            return [*found, self._inside(ReasoningDeltaEvent, delta=text)]
        self._opened.logprobs.add(logprobs)
        return [*found, self._inside(TextDeltaEvent, delta=text, logprobs=logprobs.json)]

    def end(self, finish_reason: str | None) -> list[Struct]:
        """The ends of what is open."""
        return self.close("incomplete" if self.kind == "call" else _status(finish_reason))

    def close(self, status: ItemStatus) -> list[Struct]:
        """The ends of the item that is open."""
        if self._open is None:
            return []
        item, text = self._item(self._open, status), self._open.text
        if self._open.kind == "call":
            found = [self._placed(ArgumentsDoneEvent, name=self._open.name, arguments=text)]
        elif self._open.kind == "reasoning":
            part: OutputText | ReasoningText = ReasoningText(text=text)
            found = [self._inside(ReasoningDoneEvent, text=text), self._part("done", part)]
        else:
            logprobs = self._open.logprobs.json
            part = OutputText(text=text, logprobs=logprobs)
            found = [self._inside(TextDoneEvent, text=text, logprobs=logprobs), self._part("done", part)]
        found.append(self._told("done", item))
        self.done.append(item)
        self._open = None
        return found

    def numbered(self, kind: Callable[..., Struct], **values: Any) -> Struct:
        """The next event."""
        self.number += 1
        return kind(sequence_number=self.number - 1, **values)

    @property
    def _opened(self) -> Segment:
        assert self._open is not None, "no item is open"
        return self._open

    def _begin(self, segment: Segment) -> list[Struct]:
        """Open an item; the one before it ends."""
        found = self.close("incomplete" if self.kind == "call" else "completed")
        self._open = segment
        found.append(self._told("added", self._item(segment, "in_progress")))
        if segment.kind != "call":
            empty = ReasoningText(text="") if segment.kind == "reasoning" else OutputText(text="")
            found.append(self._part("added", empty))
        return found

    def _item(self, segment: Segment, status: ItemStatus) -> OutputItem:
        """A segment as an item, which is empty while it is in progress."""
        name, begun = self._name(segment), status == "in_progress"
        if segment.kind == "call":
            return FunctionCallItem(
                id=name, status=status, call_id=segment.id or "", name=segment.name, arguments=segment.text
            )
        if segment.kind == "reasoning":
            return ReasoningItem(id=name, status=status, content=[] if begun else [ReasoningText(text=segment.text)])
        text = OutputText(text=segment.text, logprobs=segment.logprobs.json)
        return OutputMessage(id=name, status=status, content=[] if begun else [text])

    def _name(self, segment: Segment) -> str:
        return f"{_PREFIXES[segment.kind]}_{self._suffix}" + (f"_{len(self.done)}" if self.done else "")

    def _told(self, news: str, item: OutputItem) -> Struct:
        place = len(self.done)
        return self.numbered(ItemEvent, type=f"response.output_item.{news}", output_index=place, item=item)

    def _part(self, news: str, part: OutputText | ReasoningText) -> Struct:
        return self._inside(PartEvent, type=f"response.content_part.{news}", part=part)

    def _inside(self, kind: Callable[..., Struct], **values: Any) -> Struct:
        """An event of the open item's only part."""
        return self._placed(kind, content_index=0, **values)

    def _placed(self, kind: Callable[..., Struct], **values: Any) -> Struct:
        """An event of the open item."""
        return self.numbered(kind, item_id=self._name(self._opened), output_index=len(self.done), **values)


class ResponsesWriter(StreamWriter):
    """This API's events: created, in_progress, each item with its parts, deltas and ends. They carry their own names
    and numbers, and there is no [DONE]."""

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__(call.envelope, len(call.chat.job.token_ids))
        self._call, self._reader = call, call.chat.reader()
        self._output = Output(call.envelope.id)
        self._waiting: list[ChatTokenLogprob] = []  # log-probabilities of tokens whose text is held

    def prompt(self, index: int, info: PromptInfo) -> list[Struct]:
        """The response so far; with it the message, if nothing else can come before it."""
        begun = _body(self._call, "in_progress", [])
        found = [
            self._output.numbered(ResponseEvent, type="response.created", response=begun),
            self._output.numbered(ResponseEvent, type="response.in_progress", response=begun),
        ]
        plain = self._call.chat.reading.is_plain
        return [*found, *self._output.text("content", "", EncodedList())] if plain else found

    def delta(self, index: int, delta: ChoiceDelta) -> list[Struct]:
        """What a delta adds to the items, and the ends of those that are complete."""
        parts, output = self._reader.read(delta), self._output
        self._waiting += _entries(self._call, delta)
        found: list[Struct] = []
        for part in parts[:-1]:
            found += output.take(part, EncodedList())
        for part in parts[-1:]:
            found += output.take(part, self._logprobs(wanted=part.kind == "content"))
        if not parts and self._waiting and (output.kind or output.done):
            logprobs = self._logprobs(wanted=output.kind == "content")
            found += output.text("content", "", logprobs) if logprobs else []
        if delta.finish_reason is not None:
            if not output.kind and not output.done:
                found += output.text("content", "", self._logprobs(wanted=True))
            found += output.end(self._reader.finish_reason)
        self.tally.reasoning = self._reader.reasoning_tokens
        return found

    def last(self, usage: Usage) -> Struct:
        """The whole response."""
        status = _status(self._reader.finish_reason)
        body = _body(self._call, status, self._output.done, usage)
        return self._output.numbered(ResponseEvent, type=f"response.{status}", response=body)

    def frame(self, event: Struct) -> bytes:
        """An event with its name."""
        return b"event: %b\n%b" % (event.type.encode(), frame(event))  # type: ignore[attr-defined]

    def end(self) -> bytes:
        """The whole response, always."""
        return self.frame(self.last(self.tally.usage()))

    def failure(self, fault: Fault) -> bytes:
        """The response as failed, then the error, which clients raise."""
        detail, output = fault.detail(), self._output
        failed = output.numbered(
            ResponseEvent, type="response.failed", response=_body(self._call, "failed", [], error=detail)
        )
        error = output.numbered(
            ErrorEvent, message=fault.message, code=fault.code or fault.kind, param=fault.param, error=detail
        )
        return self.frame(failed) + self.frame(error)

    def _logprobs(self, *, wanted: bool) -> EncodedList:
        """Those that have waited, if they are of a message: other items have none."""
        waiting, self._waiting = self._waiting, []
        found = EncodedList()
        found.extend(waiting if wanted else [])
        return found


class ResponsesGatherer(Gatherer):
    """Gathers the whole answer."""

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__(len(call.chat.job.token_ids))
        self._call, self._reader, self._found = call, call.chat.reader(), Parsed()

    def take(self, event: Event) -> Iterator[int]:
        """Read a delta and encode its log-probabilities, which go with what it says last."""
        if not isinstance(event.value, ChoiceDelta):
            return
        self._found.add(self._reader.read(event.value))
        yield len(event.value.text)
        for some in pieces(_entries(self._call, event.value)):
            yield self._found.last_logprobs.extend(some)

    def answer(self) -> ResponseBody:
        """All items, made as those of a stream are."""
        output, none = Output(self._call.envelope.id), EncodedList()
        for segment in self._found.segments:
            if segment.kind == "call":
                for part in segment.as_call():
                    output.take(part, none)
            else:
                output.text(segment.kind, segment.text, segment.logprobs)
        if not self._found.segments:
            output.text("content", "", self._found.last_logprobs)
        output.end(self._reader.finish_reason)
        self.tally.reasoning = self._reader.reasoning_tokens
        return _body(self._call, _status(self._reader.finish_reason), output.done, self.tally.usage())


def _entries(call: ResponsesCall, delta: ChoiceDelta) -> list[ChatTokenLogprob]:
    chat = call.chat
    if chat.num_top is None or not delta.logprobs:
        return []
    return chat_logprobs(chat.model.tokenizer, delta.logprobs, chat.num_top).content


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
