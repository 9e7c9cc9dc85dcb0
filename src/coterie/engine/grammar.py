"""Grammars of one vocabulary: `Grammars` compiles a grammar's text, a `Matcher` says which token may come next.

llguidance does the parsing; arrays are numpy. A matcher's state is the tokens it was told of (`advance`), so a request
that was preempted goes on with the same one. A text that has not passed `engine.grammar_check` may not be compiled
here: a hostile one can overflow a stack or never end. Not here: who samples, and how a text is written.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import llguidance
import numpy as np
from numpy.typing import NDArray

from coterie.engine.grammar_check import parser_limits
from coterie.engine.grammar_errors import in_words
from coterie.engine.request import Request
from coterie.engine.tokenizer import Tokenizer
from coterie.spec.errors import CoterieError

_COMPILED = 64
"""Compiled grammars that are kept."""
STACK_BYTES = 64 << 20
"""Stack of the thread that compiles, many times that under which a text was checked; only what is used costs memory."""

_log = logging.getLogger(__name__)


class GrammarError(CoterieError):
    """A grammar that cannot be used, or a request that cannot follow its grammar any further."""


class Matcher:
    """Where one sequence is in its grammar. `size`: logits of a row that have a token."""

    def __init__(self, native: llguidance.LLMatcher, size: int) -> None:
        self._native = native
        self._size = size
        self._num_tokens = 0
        self._bits = np.zeros(-(-size // 32), np.uint32)

    def copy(self) -> Matcher:
        """Another sequence at the same place; both go on alone."""
        twin = Matcher(self._native.deep_copy(), self._size)
        twin._num_tokens = self._num_tokens
        return twin

    def advance(self, token_ids: Sequence[int], start: int) -> None:
        """Take in what is new in `token_ids`, whose place `start` is the grammar's first. Raises `GrammarError`."""
        new = list(token_ids[start + self._num_tokens :])
        if new and not self._native.consume_tokens(new):
            raise self._error()
        self._num_tokens += len(new)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next: bool [size]; the end token only where the grammar is fulfilled.

        Raises `GrammarError` if a bound on the work of a step is met.
        """
        self._native.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._native.is_error():
            raise self._error()
        return np.unpackbits(self._bits.view(np.uint8), count=self._size, bitorder="little").view(np.bool_)

    def _error(self) -> GrammarError:
        return GrammarError(f"the grammar cannot be followed here: {in_words(self._native.get_error())}")


class Grammars:
    """Compiles grammars for a model's tokens. Safe to share between threads; the vocabulary is read on first use."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], size: int) -> None:
        self._tokenizer = tokenizer
        self._eos = [token for token in eos_token_ids if token < size]
        self._size = size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def has_end(self) -> bool:
        """Whether there is an end token, without which no grammar could be left."""
        return bool(self._eos)

    def compile(self, text: str) -> Matcher:
        """A fresh matcher. Raises `GrammarError`."""
        with self._lock:
            found = self._compiled.get(text)
            if found is None:
                found = self._compiled[text] = self._build(text)
                if len(self._compiled) > _COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(text)
            return found.copy()

    def _build(self, text: str) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = vocabulary(self._tokenizer, self._eos, self._size)
        native = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=parser_limits())
        if native.is_error():
            raise GrammarError(in_words(native.get_error()))
        matcher = Matcher(native, self._size)
        matcher.allowed()  # the first mask is the slowest: it is paid for here, not inside a step
        return matcher


class _Spelling:
    """A tokenizer as llguidance asks for it: the bytes of each token, and which are never text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int], size: int) -> None:
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.id_to_bytes(token) for token in range(size)]
        # An end token ends the answer wherever it is sampled, whether or not the file calls it special.
        self.special_token_ids = sorted({token for token in tokenizer.special_ids if token < size}.union(eos))
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer
        self._ids = {spelled: i for i, spelled in enumerate(self.tokens) if spelled and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids that spell exactly this text, wherever in an answer it stands: where only one text can follow, its first
        token is the only one allowed. Tokenizers of the SentencePiece kind write a blank first, unless a mark does."""
        data = text if isinstance(text, bytes) else text.encode()
        plain = data.decode("utf-8", "replace")
        for mark in ("", "\x02"):
            ids = self._after(mark.encode(), self._tokenizer.encode(mark + plain, add_special_tokens=False))
            if b"".join(self._tokenizer.id_to_bytes(i) for i in ids) == data and self._special.isdisjoint(ids):
                return ids
        return self._greedy(data)

    def _after(self, mark: bytes, ids: list[int]) -> list[int]:
        """What follows the token that ends in the mark."""
        if not mark:
            return ids
        places = [i for i, token in enumerate(ids) if self._tokenizer.id_to_bytes(token).endswith(mark)]
        return ids[places[0] + 1 :] if places else []

    def _greedy(self, data: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def vocabulary(tokenizer: Tokenizer, eos: Sequence[int], size: int) -> llguidance.LLTokenizer:
    """The first `size` tokens for llguidance."""
    spelling = _Spelling(tokenizer, eos, size)
    return llguidance.LLTokenizer(spelling, n_vocab=size, eos_token=list(eos))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request and its matcher, or why it has none."""

    request: Request
    matcher: Matcher | None
    error: str | None


class GrammarThread:
    """Compiles the grammars of new requests beside the engine's thread, so that no step waits for one."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._todo: SimpleQueue[tuple[str, Future[Matcher]]] = SimpleQueue()
        self._waiting: dict[str, tuple[Request, Future[Matcher]]] = {}
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def requests(self) -> list[Request]:
        """Requests whose grammar is not there yet."""
        return [request for request, _ in self._waiting.values()]

    def add(self, request: Request) -> None:
        """Begin to compile a request's grammar."""
        assert request.params.grammar is not None
        future: Future[Matcher] = Future()
        self._waiting[request.request_id] = request, future
        if self._thread is None:
            self._thread = start_thread(self._run, "coterie-grammar")
        self._todo.put((request.params.grammar, future))

    def drop(self, request_id: str) -> Request | None:
        """Forget a request; None if it is not here."""
        found = self._waiting.pop(request_id, None)
        return None if found is None else found[0]

    def take(self, *, patience: float) -> list[Compiled]:
        """Requests that are ready, in order of arrival. Waits up to `patience` seconds for the oldest."""
        ready: list[Compiled] = []
        for request, future in list(self._waiting.values()):
            try:
                error = future.exception(0.0 if ready else patience)
            except TimeoutError:
                break
            del self._waiting[request.request_id]
            ready.append(Compiled(request, None if error else future.result(), str(error) if error else None))
        return ready

    def _run(self) -> None:
        while True:
            text, future = self._todo.get()
            try:
                future.set_result(self._grammars.compile(text))
            except Exception as error:
                if not isinstance(error, CoterieError):
                    _log.exception("a grammar could not be compiled")
                future.set_exception(error)


def start_thread(body: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread with a large stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
