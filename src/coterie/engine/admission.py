"""Door: what a request must satisfy before the engine hears of it, bound to one engine's limits. No state.

Whether there is room for one more is `engine/queue_door.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coterie.engine.build import EngineInfo
from coterie.engine.classes import ClassTable
from coterie.engine.config import NO_CLASSES, ServiceConfig
from coterie.engine.errors import InvalidRequest
from coterie.engine.grammar_check import GrammarCheck, Outline
from coterie.engine.messages import SamplingParams
from coterie.engine.queue_door import QueueDoor
from coterie.engine.sampling_params import validate, validate_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """`max_running` and `max_queued` count sequences (choices); the latter holds for each class that has no bound of
    its own. `has_text`: there is a tokenizer, so stops can work. `has_end`: there is an end token as well, so grammars
    can."""

    vocab_size: int
    max_model_len: int
    max_running: int
    max_queued: int
    has_text: bool
    has_end: bool = False
    grammars: GrammarCheck = field(default_factory=lambda: GrammarCheck(Outline(0, {})))
    service: ServiceConfig = NO_CLASSES

    @classmethod
    def of(cls, info: EngineInfo) -> Door:
        """The door of a built engine."""
        return cls(
            vocab_size=info.files.spec.vocab_size,
            max_model_len=info.max_model_len,
            max_running=info.config.max_running_requests * info.num_ranks,
            max_queued=info.config.max_queued_requests,
            has_text=info.files.tokenizer is not None,
            has_end=info.files.tokenizer is not None and bool(info.files.eos_token_ids),
            service=info.service,
            grammars=GrammarCheck(_outline(info)),
        )

    @property
    def max_sequences(self) -> int:
        """Sequences that may run or wait together, of a class that has no bound of its own."""
        return self.max_running + self.max_queued

    def queue_door(self) -> QueueDoor:
        """A door for each class's queue."""
        caps = self.service.max_queued if self.service.enabled else (None,)
        places = tuple(self.max_running + (self.max_queued if cap is None else cap) for cap in caps)
        return QueueDoor(ClassTable.of(self.service), places, self.max_running)

    def check(self, prompt: list[int], params: SamplingParams, *, want_logits: bool = False) -> SamplingParams:
        """Return the parameters in normal form, or raise `InvalidRequest` that names the field."""
        params = validate(params, vocab_size=self.vocab_size, max_model_len=self.max_model_len, scores_only=want_logits)
        if params.n > self.max_sequences:
            raise InvalidRequest(
                "n",
                f"n={params.n} is more than the {self.max_sequences} sequences that may run or wait here together "
                f"({self.max_running} run, {self.max_queued} wait); lower n, or start the engine with more "
                "max_queued_requests",
            )
        validate_prompt(prompt, params, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        if params.stop and not self.has_text:
            raise InvalidRequest("stop", "stop strings need a tokenizer and this model has none; use stop_token_ids")
        if params.grammar is not None:
            self._check_grammar(params.grammar)
        return params

    def needs_trial(self, params: SamplingParams) -> bool:
        """Whether `check` would compile a grammar for the first time, which takes up to seconds."""
        return isinstance(params.grammar, str) and self.has_end and not self.grammars.knows(params.grammar)

    def _check_grammar(self, grammar: str) -> None:
        if not self.has_end:
            raise InvalidRequest("grammar", "a grammar needs a tokenizer and an end token, which this model has not")
        self.grammars.check(grammar)


def _outline(info: EngineInfo) -> Outline:
    tokenizer = info.files.tokenizer
    special = {} if tokenizer is None else {token: tokenizer.id_to_token(token) for token in tokenizer.special_ids}
    return Outline(info.files.num_generated_ids, {token: text for token, text in special.items() if text})
