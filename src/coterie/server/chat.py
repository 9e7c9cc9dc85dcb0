"""POST /v1/chat/completions: messages in, one assistant message a choice out, streamed or whole.

Both forms are made from the same events, so they say the same. Not here: prompts (`server.prompts`), the run
(`server.generation`), grammars (`server.structured`), tools (refused, not ignored).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from coterie.engine.messages import TokenLogprob
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from coterie.server.errors import bad_request, not_supported
from coterie.server.generation import Event, PromptJob
from coterie.server.logprobs import chat_logprobs
from coterie.server.prompts import ChatFields, chat_prompt, encode_messages
from coterie.server.protocol import ChatRequest
from coterie.server.sampling import (
    Wanted,
    asked_length,
    check_fan_out,
    renamed_length,
    sampling_params,
    truncated,
)
from coterie.server.state import ServedModel, ServerState
from coterie.server.streaming import Envelope, StreamWriter, Tally, usage_wanted
from coterie.server.structured import Structure, wanted_structure


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat that is ready to run. `num_top` None: no log-probabilities were asked for."""

    model: ServedModel
    request: ChatRequest
    envelope: Envelope
    job: PromptJob
    num_top: int | None
    structure: Structure | None

    @property
    def names(self) -> dict[str, str]:
        """The client's names of the engine's fields, where they differ."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"} | renamed_length(self.request)
        return names if self.structure is None else names | {"grammar": self.structure.field}

    @property
    def jobs(self) -> list[PromptJob]:
        """A chat is one prompt."""
        return [self.job]

    def writer(self) -> StreamWriter:
        """For the streamed form."""
        return ChatWriter(self)

    def answer(self, events: list[Event]) -> Struct:
        """The whole form."""
        return chat_completion(self, events)


async def prepare_chat(
    state: ServerState, model: ServedModel, request: ChatRequest, prefix: str = "chatcmpl-"
) -> ChatCall:
    """Check the request's own rules, render and encode its prompt. `prefix`: how the answer's id begins."""
    refuse_unsupported(request)
    structure = wanted_structure(request)
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    if num_top is None and request.top_logprobs:
        raise bad_request("top_logprobs: set logprobs to true as well", param="top_logprobs")
    check_fan_out(1, request, state.config.max_choices, model.max_sequences)
    fields = ChatFields(request.add_generation_prompt, request.reasoning_effort, request.chat_template_kwargs)
    token_ids = await encode_messages(model, chat_prompt(request.messages, fields, state.config.max_messages))
    max_tokens = asked_length(request)
    token_ids = truncated(token_ids, request.truncate_prompt_tokens, model.engine.max_model_len - (max_tokens or 1))
    grammar = None if structure is None else structure.grammar
    params = sampling_params(request, Wanted(max_tokens, num_top, grammar=grammar))
    include, continuous = usage_wanted(request)
    envelope = model.envelope(prefix, include_usage=include, continuous_usage=continuous)
    return ChatCall(model, request, envelope, PromptJob(envelope.id, token_ids, params), num_top, structure)


def refuse_unsupported(request: ChatRequest) -> None:
    """Tools change the answer: they are refused until they work."""
    if request.tools and request.tool_choice != "none":
        raise not_supported("tools", "tool calls are not supported yet; leave it out")
    if request.tool_choice not in (None, "none", "auto"):
        raise not_supported("tool_choice", "tool calls are not supported yet; use \"none\" or leave it out")


class ChatWriter(StreamWriter):
    """Chunks of a streamed chat: first the role of each choice, then deltas, then a delta with finish_reason."""

    def __init__(self, call: ChatCall) -> None:
        super().__init__(call.envelope, len(call.job.token_ids))
        self._call = call

    def prompt(self, index: int, info: PromptInfo) -> list[Struct]:
        """The role chunks."""
        opening = ChatDelta(role="assistant", content="")
        return [self._chunk(ChatChunkChoice(index=i, delta=opening)) for i in range(self._call.job.params.n)]

    def delta(self, index: int, delta: ChoiceDelta) -> list[Struct]:
        """Text, if there is any, then the end, if this is it."""
        chunks: list[Struct] = []
        logprobs = _logprobs(self._call, delta.logprobs)
        if delta.text or logprobs is not None:
            shown = ChatDelta(content=delta.text)
            chunks.append(self._chunk(ChatChunkChoice(index=delta.index, delta=shown, logprobs=logprobs)))
        if delta.finish_reason is not None:
            end = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            chunks.append(self._chunk(end))
        return chunks

    def last(self, usage: Usage) -> Struct:
        """Totals."""
        return self._make([], usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return self._make([choice], self.chunk_usage())

    def _make(self, choices: list[ChatChunkChoice], usage: object) -> ChatChunk:
        envelope = self.envelope
        return ChatChunk(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            system_fingerprint=envelope.fingerprint,
            service_tier=envelope.service_tier,
            usage=usage,  # type: ignore[arg-type]
        )


@dataclass(slots=True)
class _Choice:
    """A choice while it is gathered."""

    text: list[str] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    end: ChoiceDelta | None = None


def chat_completion(call: ChatCall, events: list[Event]) -> ChatCompletion:
    """The whole answer from all events of a finished run."""
    tally = Tally(len(call.job.token_ids))
    choices = [_Choice() for _ in range(call.job.params.n)]
    for event in events:
        tally.add(event)
        if isinstance(event.value, ChoiceDelta):
            choice = choices[event.value.index]
            choice.text.append(event.value.text)
            choice.logprobs.extend(event.value.logprobs or ())
            if event.value.finish_reason is not None:
                choice.end = event.value
    envelope = call.envelope
    return ChatCompletion(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        choices=[_finished(call, i, choice) for i, choice in enumerate(choices)],
        usage=tally.usage(),
        system_fingerprint=envelope.fingerprint,
        service_tier=envelope.service_tier,
    )


def _finished(call: ChatCall, index: int, choice: _Choice) -> ChatChoice:
    assert choice.end is not None and choice.end.finish_reason is not None, "the run ended before this choice did"
    return ChatChoice(
        index=index,
        message=AssistantMessage("assistant", "".join(choice.text)),
        logprobs=None if call.num_top is None else chat_logprobs(call.model.tokenizer, choice.logprobs, call.num_top),
        finish_reason=choice.end.finish_reason,
        stop_reason=choice.end.stop_reason,
    )


def _logprobs(call: ChatCall, positions: tuple[tuple[TokenLogprob, ...], ...] | None) -> ChatLogprobs | None:
    if call.num_top is None or not positions:
        return None
    return chat_logprobs(call.model.tokenizer, positions, call.num_top)
