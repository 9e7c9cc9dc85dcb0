"""Log-probabilities in OpenAI's two shapes: chat (`content[]` with bytes) and completions (parallel lists).

The engine gives, for each token, the chosen one first, then the best, all finite. Not here: which positions are wanted.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coterie.engine.messages import TokenLogprob
from coterie.server.answers import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, TopLogprob
from coterie.server.turns import EncodedList

if TYPE_CHECKING:
    from coterie.engine.tokenizer import Tokenizer

Position = Sequence[TokenLogprob]


def token_bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    """The bytes of a token; its number if the model has no tokenizer."""
    return f"token_id:{token_id}".encode() if tokenizer is None else tokenizer.id_to_bytes(token_id)


def token_name(spelled: bytes) -> str:
    """A token as OpenAI shows it in completions: its text, or `bytes:\\x..` if it is no whole text."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprobs(tokenizer: Tokenizer | None, positions: Iterable[Position], num_top: int) -> ChatLogprobs:
    """The chat shape; `num_top` alternatives a token."""
    content = []
    for position in positions:
        chosen, *best = (_entry(tokenizer, item) for item in position)
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, best[:num_top]))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: Tokenizer | None, positions: Iterable[Position | None], num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's shape: for each token of the prompt the `num_top` best and the token itself, by id."""
    found: list[dict[str, PromptLogprob] | None] = []
    for position in positions:
        candidates = () if position is None else (position[0], *position[1 : 1 + num_top])
        shown = {
            str(item.token_id): PromptLogprob(
                logprob=item.logprob, rank=item.rank, decoded_token=token_name(token_bytes(tokenizer, item.token_id))
            )
            for item in candidates
        }
        found.append(shown or None)
    return found


def _entry(tokenizer: Tokenizer | None, item: TokenLogprob) -> TopLogprob:
    spelled = token_bytes(tokenizer, item.token_id)
    return TopLogprob(spelled.decode("utf-8", "replace"), item.logprob, list(spelled))


@dataclass(slots=True)
class LogprobColumns:
    """The completions shape of a whole choice, encoded as it grows."""

    tokens: EncodedList = field(default_factory=EncodedList)
    token_logprobs: EncodedList = field(default_factory=EncodedList)
    top_logprobs: EncodedList = field(default_factory=EncodedList)
    text_offset: EncodedList = field(default_factory=EncodedList)

    def add(self, part: CompletionLogprobs) -> int:
        """Add entries; returns the bytes of their JSON."""
        return (
            self.tokens.extend(part.tokens)
            + self.token_logprobs.extend(part.token_logprobs)
            + self.top_logprobs.extend(part.top_logprobs)
            + self.text_offset.extend(part.text_offset)
        )

    def copy(self) -> LogprobColumns:
        """Columns that begin with the same entries."""
        columns = (self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset)
        return LogprobColumns(*(column.copy() for column in columns))

    def whole(self) -> CompletionLogprobs:
        """All entries, to be encoded."""
        return CompletionLogprobs(
            tokens=self.tokens.json,
            token_logprobs=self.token_logprobs.json,
            top_logprobs=self.top_logprobs.json,
            text_offset=self.text_offset.json,
        )


class CompletionLogprobsWriter:
    """The completions shape of one choice, whose text offsets run on from call to call."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> CompletionLogprobsWriter:
        """One that goes on from here."""
        found = CompletionLogprobsWriter(self._tokenizer, self._num_top)
        found._offset = self._offset
        found._decoder.setstate(self._decoder.getstate())
        return found

    def write(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], text: str = ""
    ) -> CompletionLogprobs:
        """Entries of these tokens. `text`, if given, is what they spell where special tokens are not shown in it."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        hidden = self._hidden(token_ids, text)
        for i, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
            spelled = token_bytes(self._tokenizer, token_id)
            tokens.append(token_name(spelled))
            chosen.append(position[0].logprob if position else None)
            top.append(self._alternatives(position) if position else None)
            offsets.append(self._offset)
            self._offset += 0 if i < hidden else len(self._decoder.decode(spelled))
        return CompletionLogprobs(tokens=tokens, token_logprobs=chosen, top_logprobs=top, text_offset=offsets)

    def _hidden(self, token_ids: Sequence[int], text: str) -> int:
        """How many leading tokens are not part of the echoed text: a BOS that the tokenizer put before it."""
        tokenizer = self._tokenizer
        if not text or not token_ids or tokenizer is None or tokenizer.bos_token is None:
            return 0
        return int(token_ids[0] == tokenizer.bos_token_id and not text.startswith(tokenizer.bos_token))

    def _alternatives(self, position: Position) -> dict[str, float]:
        """The best tokens and the chosen one, which may be no member of them."""
        found: dict[str, float] = {}
        for item in (*position[1 : 1 + self._num_top], position[0]):
            name = token_name(token_bytes(self._tokenizer, item.token_id))
            found[name] = max(item.logprob, found.get(name, item.logprob))
        return found
