"""The bodies of POST /v1/responses: what a client may ask, the Response it gets, and the events of its stream.

Only values, as in `server.protocol` and `server.answers`; `server.responses` turns them into a chat and back. Nothing
is remembered: what refers to an earlier response is declared so that it can be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from coterie.server.answers import ErrorDetail, TopLogprob
from coterie.server.protocol import ContentPart, Count, Name, Role, SamplingFields, TemplateArguments


class InputItem(Struct, frozen=True, kw_only=True):
    """One item of the input: a message (with or without `type`), a function call, its output, or earlier reasoning."""

    type: Name | None = None
    role: Role | None = None
    content: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """`type`: text, json_object, or json_schema with its name and schema."""

    type: Name = "text"
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """How the text should look."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """`effort` reaches the chat template as `reasoning_effort`; nothing is summarised."""

    effort: Name | None = None
    summary: Name | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/responses. Without a length the answer may fill the context; `max_output_tokens` wins over the
    chat's names for it. Fields of stored responses are refused unless null or false."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=65_536)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Name], Meta(max_length=64)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Name, str], Meta(max_length=64)] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    previous_response_id: Name | None = None
    conversation: Name | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None


class OutputLogprob(Struct, frozen=True):
    """One token of the text and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A piece of text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[OutputLogprob] = []


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The message that the model wrote; without content while it has written nothing."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A piece of reasoning."""

    text: str


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought. Nothing is summarised."""

    id: str
    status: ItemStatus
    summary: list[str] = []
    content: list[ReasoningText]


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model wants made; its result is sent back under `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    """Where the input's tokens came from."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """What the output's tokens were."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseBody(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/responses, and what the events that begin and end its stream carry. Nothing is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None = None
    error: ErrorDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions
    service_tier: str | UnsetType = UNSET
    store: bool = False
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete`, `.failed`: the whole response as it stands."""

    type: str
    sequence_number: int
    response: ResponseBody


class ItemEvent(Struct, frozen=True, kw_only=True):
    """`response.output_item.added` and `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(Struct, frozen=True, kw_only=True):
    """`response.content_part.added` and `.done`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class ReasoningDeltaEvent(Struct, frozen=True, kw_only=True):
    """`response.reasoning_text.delta`."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(Struct, frozen=True, kw_only=True):
    """`response.reasoning_text.done`."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDeltaEvent(Struct, frozen=True, kw_only=True):
    """`response.function_call_arguments.delta`."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(Struct, frozen=True, kw_only=True):
    """`response.function_call_arguments.done`."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class TextDeltaEvent(Struct, frozen=True, kw_only=True):
    """`response.output_text.delta`."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[OutputLogprob]


class TextDoneEvent(Struct, frozen=True, kw_only=True):
    """`response.output_text.done`."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[OutputLogprob]


class ErrorEvent(Struct, frozen=True, kw_only=True):
    """The last event of a stream that failed; `error` says it in the shape of other routes too, which clients raise."""

    type: Literal["error"] = "error"
    sequence_number: int
    message: str
    code: str | int | None
    param: str | None
    error: ErrorDetail


StreamEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent
)
