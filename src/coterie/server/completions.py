"""POST /v1/completions: raw prompts in, text out, with echo and log-probabilities, streamed or whole.

Choice `i` of prompt `p` has index `p * n + i`. An echo is the first news of each choice, so both forms share it. Not
here: prompts (`server.prompts`), the run (`server.generation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import UNSET, Struct, UnsetType

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.answers import Completion, CompletionChoice, PromptLogprob, Usage
from coterie.server.errors import not_supported
from coterie.server.gathering import Gatherer
from coterie.server.generation import Event, PromptJob
from coterie.server.logprobs import CompletionLogprobsWriter, LogprobColumns, prompt_logprobs
from coterie.server.prompts import EncodedPrompt, echo_text, encode_prompts
from coterie.server.protocol import CompletionRequest
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
from coterie.server.turns import EncodedList, pieces

DEFAULT_MAX_TOKENS = 16
_Scores = list[dict[str, PromptLogprob] | None] | UnsetType


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """Completions that are ready to run."""

    model: ServedModel
    request: CompletionRequest
    envelope: Envelope
    jobs: list[PromptJob]
    structure: Structure | None

    @property
    def num_top(self) -> int | None:
        """Alternatives a token; None if no log-probabilities were asked for."""
        return self.request.logprobs

    @property
    def echo(self) -> bool:
        """Whether choices begin with the prompt."""
        return bool(self.request.echo)

    @property
    def names(self) -> dict[str, str]:
        """The client's names of the engine's fields, where they differ."""
        names = {"prompt_logprobs": "logprobs"} | renamed_length(self.request, "max_tokens")
        return names if self.structure is None else names | {"grammar": self.structure.field}

    def writer(self) -> StreamWriter:
        """For the streamed form."""
        return CompletionWriter(self)

    def gatherer(self) -> Gatherer:
        """For the whole form."""
        return CompletionGatherer(self)


async def prepare_completions(state: ServerState, model: ServedModel, request: CompletionRequest) -> CompletionCall:
    """Check the request's own rules and encode its prompts."""
    structure = wanted_structure(request)
    if request.best_of not in (None, 1, request.n):
        raise not_supported("best_of", "choosing among hidden choices is not supported; use n")
    if request.stream and request.prompt_logprobs is not None:
        raise not_supported("prompt_logprobs", "a stream does not carry them; use echo and logprobs")
    special = request.add_special_tokens is not False
    prompts = await encode_prompts(
        model, request.prompt, add_special_tokens=special, max_prompts=state.config.max_prompts
    )
    check_fan_out(len(prompts), request, state.config.max_choices, model.max_sequences)
    include, continuous = usage_wanted(request)
    envelope = model.envelope("cmpl-", include_usage=include, continuous_usage=continuous)
    jobs = [_job(model, request, prompt, f"{envelope.id}-{i}", structure) for i, prompt in enumerate(prompts)]
    return CompletionCall(model, request, envelope, jobs, structure)


def _job(
    model: ServedModel,
    request: CompletionRequest,
    prompt: EncodedPrompt,
    request_id: str,
    structure: Structure | None,
) -> PromptJob:
    asked = asked_length(request)
    limit = model.engine.max_model_len
    token_ids = truncated(prompt.token_ids, request.truncate_prompt_tokens, limit - (asked or 1))
    max_tokens = asked
    if asked is None and len(token_ids) + DEFAULT_MAX_TOKENS <= limit:
        max_tokens = DEFAULT_MAX_TOKENS  # else None: the room left
    # With max_tokens 0 only the prompt is scored; asking for its log-probabilities tells the engine so.
    asked_scores = [request.prompt_logprobs, request.logprobs if request.echo else None, 0 if max_tokens == 0 else None]
    scored = max((k for k in asked_scores if k is not None), default=None)
    grammar = None if structure is None else structure.grammar
    params = sampling_params(request, Wanted(max_tokens, request.logprobs, scored, grammar))
    text = echo_text(model, EncodedPrompt(prompt.text, token_ids)) if request.echo else ""
    return PromptJob(request_id, token_ids, params, text)


class _Texts:
    """Turns the events of all choices into pieces: text and log-probabilities, the echo first."""

    def __init__(self, call: CompletionCall) -> None:
        self._call = call
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        self._begun: set[int] = set()

    def choice_index(self, prompt: int, index: int) -> int:
        """Position among all choices of the request."""
        return prompt * self._call.jobs[prompt].params.n + index

    def echo(self, prompt: int, info: PromptInfo) -> Iterator[int | LogprobColumns]:
        """Make the log-probabilities of a prompt, for each of its choices to begin with: numbers of bytes while they
        grow, then all of them."""
        job, columns = self._call.jobs[prompt], LogprobColumns()
        writer = CompletionLogprobsWriter(self._call.model.tokenizer, self._call.num_top or 0)
        positions = info.prompt_logprobs or [None] * len(job.token_ids)
        text = job.text
        for some in pieces(range(len(job.token_ids))):
            ids = [job.token_ids[i] for i in some]
            yield columns.add(writer.write(ids, [positions[i] for i in some], text))
            text = ""
        for i in range(job.params.n):
            self._writers[self.choice_index(prompt, i)] = writer.copy()
        yield columns

    def piece(self, prompt: int, delta: ChoiceDelta) -> CompletionChoice:
        """A delta of a choice."""
        index = self.choice_index(prompt, delta.index)
        logprobs = None
        if self._call.num_top is not None and delta.logprobs is not None and delta.token_ids:
            logprobs = self._writer(index).write(delta.token_ids, delta.logprobs)
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=self._prompt_ids(index, prompt),
            token_ids=list(delta.token_ids) if self._call.request.return_token_ids else UNSET,
        )

    def _prompt_ids(self, index: int, prompt: int) -> list[int] | UnsetType:
        """The prompt's ids, if they were asked for, with a choice's first news."""
        if not self._call.request.return_token_ids or index in self._begun:
            return UNSET
        self._begun.add(index)
        return self._call.jobs[prompt].token_ids

    def _writer(self, index: int) -> CompletionLogprobsWriter:
        if index not in self._writers:
            self._writers[index] = CompletionLogprobsWriter(self._call.model.tokenizer, self._call.num_top or 0)
        return self._writers[index]


class CompletionWriter(StreamWriter):
    """Chunks of a streamed completion."""

    def __init__(self, call: CompletionCall) -> None:
        super().__init__(call.envelope, sum(len(job.token_ids) for job in call.jobs))
        self._call, self._texts = call, _Texts(call)
        self._shows_ids = bool(call.request.return_token_ids)

    def prompt(self, index: int, info: PromptInfo) -> Iterator[Struct | None]:
        """The echo."""
        job, logprobs = self._call.jobs[index], None
        if not self._call.echo:
            return
        if self._call.num_top is not None:
            for made in self._texts.echo(index, info):
                if isinstance(made, LogprobColumns):
                    logprobs = made.whole()
                else:
                    yield None
        for i in range(job.params.n):
            place = self._texts.choice_index(index, i)
            yield self._chunk(CompletionChoice(index=place, text=job.text, logprobs=logprobs))

    def plain(self, index: int, delta: ChoiceDelta) -> bytes | None:
        """Text alone."""
        if not delta.is_plain_text or self.envelope.continuous_usage or self._shows_ids:
            return None
        return self.text_event(self._texts.choice_index(index, delta.index), delta.text, self._text_chunk)

    def delta(self, index: int, delta: ChoiceDelta) -> list[Struct]:
        """Text, if there is any, and the end, if this is it."""
        piece = self._texts.piece(index, delta)
        shown = piece.text or piece.logprobs is not None or piece.finish_reason is not None or piece.token_ids
        return [self._chunk(piece)] if shown else []

    def last(self, usage: Usage) -> Struct:
        """Totals."""
        return _make(self.envelope, [], usage)

    def _text_chunk(self, index: int, text: str) -> Completion:
        return self._chunk(CompletionChoice(index=index, text=text))

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return _make(self.envelope, [choice], self.chunk_usage())


@dataclass(slots=True)
class _Choice:
    """A choice while it is gathered."""

    text: list[str] = field(default_factory=list)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: CompletionChoice) -> int:
        self.text.append(piece.text)
        if piece.token_ids is not UNSET:
            self.token_ids += piece.token_ids
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return 0 if piece.logprobs is None else self.logprobs.add(piece.logprobs)


class CompletionGatherer(Gatherer):
    """Gathers the whole answer."""

    def __init__(self, call: CompletionCall) -> None:
        super().__init__(sum(len(job.token_ids) for job in call.jobs))
        self._call, self._texts = call, _Texts(call)
        self._choices = [_Choice() for job in call.jobs for _ in range(job.params.n)]
        self._scores: dict[int, _Scores] = {}

    def take(self, event: Event) -> Iterator[int]:
        """Add a piece to a choice, or the echo to all choices of a prompt."""
        value = event.value
        if isinstance(value, PromptInfo):
            yield from self._prompt(event.prompt, value)
        else:
            piece = self._texts.piece(event.prompt, value)
            yield self._choices[piece.index].add(piece)

    def answer(self) -> Completion:
        """All choices."""
        call = self._call
        n = len(self._choices) // len(call.jobs)
        finished = [
            CompletionChoice(
                index=i,
                text="".join(choice.text),
                logprobs=None if call.num_top is None else choice.logprobs.whole(),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=self._scores[i // n],
                prompt_token_ids=call.jobs[i // n].token_ids if call.request.return_token_ids else UNSET,
                token_ids=choice.token_ids if call.request.return_token_ids else UNSET,
            )
            for i, choice in enumerate(self._choices)
        ]
        return _make(call.envelope, finished, self.tally.usage())

    def _prompt(self, prompt: int, info: PromptInfo) -> Iterator[int]:
        call, job = self._call, self._call.jobs[prompt]
        self._scores[prompt] = UNSET
        if call.request.prompt_logprobs is not None and info.prompt_logprobs is not None:
            scores = EncodedList()
            for some in pieces(info.prompt_logprobs):
                yield scores.extend(prompt_logprobs(call.model.tokenizer, some, call.request.prompt_logprobs))
            self._scores[prompt] = scores.json
        if not call.echo:
            return
        choices = [self._choices[self._texts.choice_index(prompt, i)] for i in range(job.params.n)]
        if call.num_top is not None:
            for made in self._texts.echo(prompt, info):
                if isinstance(made, int):
                    yield made
                else:
                    for choice in choices:
                        choice.logprobs = made.copy()
        for choice in choices:
            choice.text.append(job.text)


def _make(envelope: Envelope, choices: list[CompletionChoice], usage: object = UNSET) -> Completion:
    return Completion(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        choices=choices,
        system_fingerprint=envelope.fingerprint,
        service_tier=envelope.service_tier,
        usage=usage,  # type: ignore[arg-type]
    )
