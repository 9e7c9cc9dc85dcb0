"""What the server sends: the bodies of answers and stream chunks as msgspec Structs, in OpenAI's shapes.

Only values; `server.chat` and `server.completions` fill them, msgspec encodes them. UNSET fields are left out of the
JSON, None becomes null. Not here: what the server accepts (`server.protocol`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(Struct, frozen=True):
    """The body of every error, and the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(Struct, frozen=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    """What the completion's tokens were."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a request; the prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct, frozen=True):
    """One likely token of a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    """The chosen token of a position and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a chat answer's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    """`arguments`: the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model wants made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """A finished chat answer. `reasoning` repeats `reasoning_content`: clients read one or the other. `content` is null
    if there are calls and no text."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One finished choice of a chat. `stop_reason`: the stop string or token id that ended it."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to a function call: first the name with empty arguments, then arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to call number `index`; the first chunk of a call has its id."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message. `reasoning` repeats `reasoning_content`."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """News of one choice of a streamed chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed chat. `usage` is there only if it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a text completion, one entry a token; the first echoed token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """One candidate of a position of the prompt; rank 1 is the most likely of the whole vocabulary."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One choice of a text completion, finished or (finish_reason null) as a stream's news.

    Only if asked for: `prompt_logprobs`, one entry a token of the prompt, from token id to its values (the first has
    none); `token_ids`, and with a choice's first news `prompt_token_ids`.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/completions and, with `usage` only if asked for, one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """One served model. `max_model_len`: prompt and completion together, in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "coterie"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(Struct, frozen=True, kw_only=True):
    """Exactly the ids that the engine would see."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct, frozen=True):
    """Text of the ids, special tokens included."""

    prompt: str


class Status(Struct, frozen=True, kw_only=True):
    """Answer of /health, /ping and /ready."""

    status: str


class Reloaded(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/admin/reload: what serves now, and how long it took to get there."""

    model: str
    max_model_len: int
    seconds: float


class Version(Struct, frozen=True):
    """Answer of GET /version."""

    version: str
