"""What the server accepts: request bodies as msgspec Structs with bounds, decoded and checked in one pass.

Types are strict ("0.5" is no number, true no token id). Ranges of sampling values belong to `engine.sampling_params`,
which sees every request right after. Not here: answers (`server.answers`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from coterie.engine.sampling_params import DEFAULT_LIMITS
from coterie.server.errors import bad_request, from_decode_error, not_supported

logger = logging.getLogger("coterie.server")

MAX_INT = 2**31 - 1
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "function"}  # fmt: skip
"""Roles that are accepted, and what the template is told."""

Name = Annotated[str, Meta(max_length=512)]
StopString = Annotated[str, Meta(max_length=1024)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=64)] | None
TokenIds = Annotated[list[int], Meta(max_length=1_048_576)]
Choices = Annotated[list[str], Meta(max_length=10_000)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Role = Annotated[str, Meta(max_length=512, extra_json_schema={"enum": list(ROLES)})]


def _shown(low: float | None = None, high: float | None = None) -> Meta:
    """A range for /openapi.json. It is checked at the engine's door, which knows it for every caller."""
    bounds = {"minimum": low, "maximum": high}
    return Meta(extra_json_schema={name: value for name, value in bounds.items() if value is not None})


Penalty = Annotated[float, _shown(-DEFAULT_LIMITS.max_penalty, DEFAULT_LIMITS.max_penalty)]
Share = Annotated[float, _shown(0, 1)]

IGNORED = frozenset({
    "user", "metadata", "store", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "max_tool_calls",
})  # fmt: skip
"""Fields that say nothing a text server of its own needs: accepted without a word."""

UNSUPPORTED = frozenset({
    "audio", "modalities", "prediction", "web_search_options", "suffix", "use_beam_search", "guided_decoding_backend",
    "guided_whitespace_pattern", "grammar", "json_schema", "regex", "ebnf", "prompt_logprobs",
    "prompt_embeds", "continue_final_message", "chat_template", "documents", "functions", "function_call",
    "allowed_token_ids", "bad_words", "logits_processors", "return_token_ids", "return_tokens_as_token_ids", "echo",
})  # fmt: skip
"""Fields whose silent loss would change the answer: refused unless null, false or empty."""

GIVEN: Mapping[str, Any] = {"modalities": ["text"]}
"""Values of such fields that ask for what is given anyway."""

ON_IF_EMPTY = frozenset({"web_search_options"})
"""Such fields that an empty object turns on, with its defaults."""

_EMPTY = frozenset({b"null", b"false", b"[]", b"{}", b'""', b'"none"', b'"auto"'})
_MAX_WARNINGS = 200


class StreamOptions(Struct, frozen=True):
    """`include_usage`: totals in one last chunk; `continuous_usage_stats`: and the counts so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """A JSON schema with its name. `strict` is taken as true: an answer always follows the schema."""

    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """`type`: text, json_object, or json_schema with its `json_schema`."""

    type: Name = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must be, one of: a JSON schema (an object, or JSON in a string), any JSON object, a regular
    expression for the whole text, one of some texts, a grammar in llguidance's Lark dialect."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class SamplingFields(Struct, frozen=True, kw_only=True):
    """What both completion endpoints take. null means the default. OpenAI's names, then vLLM's for the rest.

    `max_completion_tokens` wins over `max_tokens`. truncate_prompt_tokens keeps the prompt's last tokens.
    """

    model: Name | None = None
    service_tier: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, _shown(0, DEFAULT_LIMITS.max_temperature)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, _shown(-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, _shown(1e-3, DEFAULT_LIMITS.max_repetition_penalty)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=4096)] | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class ContentPart(Struct, frozen=True):
    """A piece of a message. Only `text` parts are served; nothing is ever fetched."""

    type: Name
    text: str | None = None
    refusal: str | None = None


class EarlierFunction(Struct, frozen=True):
    """`arguments`: JSON in a string, as OpenAI sends it, or the object itself."""

    name: Name
    arguments: str | dict[str, Any] | None = None


class EarlierCall(Struct, frozen=True, kw_only=True):
    """A call that an assistant's message of an earlier turn made."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: EarlierFunction


class Message(Struct, frozen=True, kw_only=True):
    """One message of a chat. The roles are system, developer (read as system), user, assistant, tool and function.

    `reasoning` is another name of `reasoning_content`.
    """

    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[EarlierCall], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=65_536)]
TemplateArguments = Annotated[dict[Name, Any], Meta(max_length=64)]


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions. Without a length the answer may fill the context."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/completions. `prompt`: a string, strings, token ids, or lists of ids. 16 tokens by default."""

    prompt: str | Annotated[list[str | int | TokenIds], Meta(min_length=1, max_length=1_048_576)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=4096)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: `prompt`, or `messages` as for a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Name | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds


class ReloadRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/admin/reload: a model's folder or GGUF file, within the folders that the server allows.
    `drain`: give the old model up first, where memory does not hold both."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    drain: bool = False


T = TypeVar("T", bound=Struct)


class Unknown:
    """What requests say that means nothing here: logged once each, or refused if the server is `strict`."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._warned: set[str] = set()

    def judge(self, what: str, param: str) -> None:
        """Take note of it. Raises ApiError naming the field if it is refused."""
        if self._strict:
            raise bad_request(f"{param}: unknown {what} (the server runs with --strict-api)", param=param)
        if what not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(what)
            logger.warning("unknown request %s is ignored", what)


class BodyDecoder(Generic[T]):
    """Decodes one kind of request. Unknown fields are logged once each; with `strict` they are refused."""

    def __init__(self, kind: type[T], *, strict: bool) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(kind)) | IGNORED
        self._unknown = Unknown(strict=strict)

    def decode(self, body: bytes) -> T:
        """The request, or a 400 that names the field at fault."""
        try:
            request = self._decoder.decode(body)
            names = self._names.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise from_decode_error(error, body) from error
        if not names.keys() <= self._known:
            self._judge(names)
        return request

    def _judge(self, names: dict[str, msgspec.Raw]) -> None:
        for name in names.keys() - self._known:
            shown = name if name.isidentifier() and len(name) <= 64 else repr(name[:64])
            if name in UNSUPPORTED:
                if _asks_for(name, bytes(names[name])):
                    raise not_supported(name, "this server does not support this field yet; leave it out")
            else:
                self._unknown.judge(f"field {shown}", name[:64])


def _asks_for(name: str, value: bytes) -> bool:
    """Whether a field that is not supported asks for something."""
    if name in ON_IF_EMPTY and value.strip() == b"{}":
        return True
    return value not in _EMPTY and (name not in GIVEN or msgspec.json.decode(value) != GIVEN[name])
