"""POST /v1/chat/completions: messages in, one assistant message a choice out, streamed or whole.

Both forms are made from the same events, so they say the same. Not here: prompts (`server.prompts`), the run
(`server.generation`), what is asked of the answer (`server.structured`, `server.tools`), reading it (`server.reader`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec import UNSET, Struct

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
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from coterie.server.errors import bad_request, not_supported
from coterie.server.forcing import Opening, answer_grammar, special_in
from coterie.server.formats import HERMES
from coterie.server.gathering import Gatherer
from coterie.server.generation import Event, PromptJob
from coterie.server.logprobs import chat_logprobs
from coterie.server.parsers import ParseRules, start_of
from coterie.server.parts import Parsed, Part
from coterie.server.prompts import ChatFields, chat_prompt, encode_messages
from coterie.server.protocol import ChatRequest
from coterie.server.reader import ChoiceReader, Reading, call_id
from coterie.server.sampling import (
    Wanted,
    asked_length,
    check_fan_out,
    renamed_length,
    sampling_params,
    truncated,
)
from coterie.server.state import ServedModel, ServerState
from coterie.server.streaming import Envelope, StreamWriter, usage_wanted
from coterie.server.structured import Structure, wanted_structure
from coterie.server.tools import ToolUse, tool_use
from coterie.server.turns import EncodedList, pieces


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat that is ready to run. `num_top` None: no log-probabilities were asked for."""

    model: ServedModel
    request: ChatRequest
    envelope: Envelope
    job: PromptJob
    num_top: int | None
    structure: Structure | None
    reading: Reading

    @property
    def names(self) -> dict[str, str]:
        """The client's names of the engine's fields, where they differ."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        names |= renamed_length(self.request, "max_completion_tokens")
        return names if self.structure is None else names | {"grammar": self.structure.field}

    @property
    def jobs(self) -> list[PromptJob]:
        """A chat is one prompt."""
        return [self.job]

    def reader(self) -> ChoiceReader:
        """For one choice."""
        return ChoiceReader(self.reading, self.model.tokenizer)

    def writer(self) -> StreamWriter:
        """For the streamed form."""
        return ChatWriter(self)

    def gatherer(self) -> Gatherer:
        """For the whole form."""
        return ChatGatherer(self)


async def prepare_chat(
    state: ServerState, model: ServedModel, request: ChatRequest, prefix: str = "chatcmpl-"
) -> ChatCall:
    """Check the request's own rules, render and encode its prompt. `prefix`: how the answer's id begins."""
    use = tool_use(request)
    structure = wanted_structure(request)
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    if num_top is None and request.top_logprobs:
        raise bad_request("top_logprobs: set logprobs to true as well", param="top_logprobs")
    check_fan_out(1, request, state.config.max_choices, model.max_sequences)
    fields = ChatFields(
        request.add_generation_prompt,
        request.reasoning_effort,
        request.chat_template_kwargs,
        None if use is None else use.declared,
    )
    prompt = await encode_messages(model, chat_prompt(request.messages, fields, state.config.max_messages))
    max_tokens, room = asked_length(request), model.engine.max_model_len
    token_ids = truncated(prompt.token_ids, request.truncate_prompt_tokens, room - (max_tokens or 1))
    ends_itself = model.engine.takes_grammars and not (request.ignore_eos or request.min_tokens)
    plan = plan_answer(model, prompt.text, use, structure, ends_itself=ends_itself)
    structure = plan.structure
    grammar = None if structure is None else structure.grammar
    wanted = Wanted(max_tokens, num_top, grammar=grammar, shown_special_ids=plan.shown_special_ids)
    params = sampling_params(request, wanted)
    include, continuous = usage_wanted(request)
    envelope = model.envelope(prefix, include_usage=include, continuous_usage=continuous)
    job = PromptJob(envelope.id, token_ids, params)
    return ChatCall(model, request, envelope, job, num_top, structure, plan.reading)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What an answer must follow and how it is read."""

    structure: Structure | None
    reading: Reading
    shown_special_ids: tuple[int, ...] = ()


def plan_answer(
    model: ServedModel, prompt: str, use: ToolUse | None, structure: Structure | None, *, ends_itself: bool
) -> AnswerPlan:
    """From the end of the prompt, the model's formats and the request. `ends_itself`: a grammar may end the answer;
    else a second call is dropped, not prevented. Raises ApiError if calls cannot be
    forced."""
    thinking, form, tokenizer = model.formats.thinking, model.formats.calls, model.tokenizer
    if use is not None and form is None:
        if use.forced:
            raise not_supported("tool_choice", "the server runs with --tool-call-parser none; use auto or none")
        use = None
    if tokenizer is None or (thinking is None and use is None):
        return AnswerPlan(structure, Reading())
    start = start_of(prompt, thinking)
    held = use if use is None or ends_itself else replace(use, many=True)
    structure = answer_grammar(structure, held, form or HERMES, Opening(thinking, start), tokenizer)
    rules = ParseRules(
        thinking,
        None if use is None else form,
        {} if use is None else use.tools,
        None if use is None or use.many else 1,
        is_forced=use is not None and bool(use.forced),
    )
    tags = "".join((*(rules.calls.tags if rules.calls else ()), *((thinking.open, thinking.close) if thinking else ())))
    shown = tuple(sorted(special_in(tokenizer, tags)))
    return AnswerPlan(structure, Reading(rules, start, tokenizer.special_ids.difference(shown)), shown)


class ChatWriter(StreamWriter):
    """Chunks of a streamed chat: first the role of each choice, then deltas, then a delta with finish_reason."""

    def __init__(self, call: ChatCall) -> None:
        super().__init__(call.envelope, len(call.job.token_ids))
        self._call = call
        self._readers = [call.reader() for _ in range(call.job.params.n)]
        self._calls = [-1] * call.job.params.n  # numbers of the last calls that have begun

    def prompt(self, index: int, info: PromptInfo) -> list[Struct]:
        """The role chunks."""
        opening = ChatDelta(role="assistant", content="")
        return [self._chunk(ChatChunkChoice(index=i, delta=opening)) for i in range(self._call.job.params.n)]

    def plain(self, index: int, delta: ChoiceDelta) -> bytes | None:
        """Text alone, where all text is content."""
        if not (delta.is_plain_text and self._call.reading.is_plain) or self.envelope.continuous_usage:
            return None
        return self.text_event(delta.index, delta.text, self._text_chunk)

    def delta(self, index: int, delta: ChoiceDelta) -> list[Struct]:
        """Text, if there is any, then the end, if this is it."""
        chunks: list[Struct] = []
        reader = self._readers[delta.index]
        logprobs = _logprobs(self._call, delta.logprobs)
        shown = [one for part in reader.read(delta) if (one := self._shown(delta.index, part)) is not None]
        self.tally.reasoning = sum(reader.reasoning_tokens for reader in self._readers)
        for one in shown or ([ChatDelta(content="")] if logprobs is not None else []):
            chunks.append(self._chunk(ChatChunkChoice(index=delta.index, delta=one, logprobs=logprobs)))
            logprobs = None
        if delta.finish_reason is not None:
            end = ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(),
                finish_reason=reader.finish_reason,
                stop_reason=delta.stop_reason,
            )
            chunks.append(self._chunk(end))
        return chunks

    def last(self, usage: Usage) -> Struct:
        """Totals."""
        return self._make([], usage)

    def _shown(self, index: int, part: Part) -> ChatDelta | None:
        """A part of a choice as a delta. What was sent as content or as a call cannot be taken back."""
        match part.kind:
            case "reasoning":
                return ChatDelta(reasoning_content=part.text, reasoning=part.text)
            case "content":
                return ChatDelta(content=part.text)
            case "begun":
                self._calls[index] += 1
                named = FunctionDelta(name=part.name, arguments="")
                begun = ToolCallDelta(
                    index=self._calls[index], id=part.id or call_id(), type="function", function=named
                )
                return ChatDelta(tool_calls=[begun])
            case "arguments":
                piece = FunctionDelta(arguments=part.text)
                return ChatDelta(tool_calls=[ToolCallDelta(index=self._calls[index], function=piece)])
        return None

    def _text_chunk(self, index: int, text: str) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=text)))

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

    reader: ChoiceReader
    found: Parsed = field(default_factory=Parsed)
    logprobs: EncodedList = field(default_factory=EncodedList)
    end: ChoiceDelta | None = None


class ChatGatherer(Gatherer):
    """Gathers the whole answer."""

    def __init__(self, call: ChatCall) -> None:
        super().__init__(len(call.job.token_ids))
        self._call = call
        self._choices = [_Choice(call.reader()) for _ in range(call.job.params.n)]

    def take(self, event: Event) -> Iterator[int]:
        """Read a choice's delta and encode its log-probabilities."""
        delta = event.value
        if not isinstance(delta, ChoiceDelta):
            return
        choice = self._choices[delta.index]
        choice.found.add(choice.reader.read(delta))
        if delta.finish_reason is not None:
            choice.end = delta
        yield len(delta.text)
        if self._call.num_top is not None:
            for some in pieces(delta.logprobs or ()):
                made = chat_logprobs(self._call.model.tokenizer, some, self._call.num_top)
                yield choice.logprobs.extend(made.content)

    def answer(self) -> ChatCompletion:
        """All choices."""
        self.tally.reasoning = sum(choice.reader.reasoning_tokens for choice in self._choices)
        envelope = self._call.envelope
        return ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._finished(i, choice) for i, choice in enumerate(self._choices)],
            usage=self.tally.usage(),
            system_fingerprint=envelope.fingerprint,
            service_tier=envelope.service_tier,
        )

    def _finished(self, index: int, choice: _Choice) -> ChatChoice:
        finish_reason = choice.reader.finish_reason
        assert choice.end is not None and finish_reason is not None, "the run ended before this choice did"
        return ChatChoice(
            index=index,
            message=_message(choice.found),
            logprobs=None if self._call.num_top is None else ChatLogprobs(choice.logprobs.json),
            finish_reason=finish_reason,
            stop_reason=choice.end.stop_reason,
        )


def _message(found: Parsed) -> AssistantMessage:
    reasoning, content = found.reasoning or UNSET, found.content
    calls = [
        ToolCall(id=call.id or call_id(), function=FunctionCall(call.name, call.arguments)) for call in found.calls
    ]
    return AssistantMessage(
        content=None if calls and not content else content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )


def _logprobs(call: ChatCall, positions: tuple[tuple[TokenLogprob, ...], ...] | None) -> ChatLogprobs | None:
    if call.num_top is None or not positions:
        return None
    return chat_logprobs(call.model.tokenizer, positions, call.num_top)
