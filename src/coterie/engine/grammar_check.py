"""Whether a grammar's text may be let in: a bound on its size, then a trial in a child process.

llguidance recurses on what a text nests or refers to and does not count all of its work, so a hostile text can overflow
a stack or never end. Neither can be stopped inside a process that serves others. So the parent (`GrammarCheck`) keeps
one child (`python -m coterie.engine.grammar_check`), started for the first grammar, that compiles every new text on a
small stack and walks a few tokens into it, for a vocabulary of the bytes and the model's special tokens; a child that
dies or is late is replaced and its text refused. Masks need no such care: their work is counted.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llguidance

from coterie.engine.errors import EngineBusy, InvalidRequest
from coterie.engine.grammar_errors import in_words

MAX_BYTES = 256 * 1024
SECONDS = 2.0
"""A trial that takes longer is ended and its text refused."""
MAX_WAITING = 16
"""Trials run one after another; so many may wait."""
_START_SECONDS = 30.0
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 4 << 30
_KNOWN = 1024
_WALKS, _STEPS = 9, 12
"""Beginnings that a trial takes, and tokens of each."""


def parser_limits() -> llguidance.LLParserLimits:
    """Bounds on the work of a step (the library's own) and on building the lexer (an eighth of its own)."""
    return llguidance.LLParserLimits(initial_lexer_fuel=125_000, max_grammar_size=100_000, verbose_errors=False)


@dataclass(frozen=True, slots=True)
class Outline:
    """What of a vocabulary a grammar can name: how many ids there are, and the special tokens by their id. At least 256
    ids are not special."""

    size: int
    special: Mapping[int, str]


class GrammarCheck:
    """The parent's side. Safe to share between threads; a text that passed is remembered."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, None] = OrderedDict()
        self._places = threading.Semaphore(MAX_WAITING)

    def knows(self, text: str) -> bool:
        """Whether `check` would return at once."""
        return text in self._known

    def check(self, text: str) -> None:
        """Return if the text may be compiled. Blocks for up to `SECONDS` for each text before it.

        Raises `InvalidRequest` for "grammar", or `EngineBusy` if too many texts wait.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            message = "the grammar is not valid Unicode: it holds half a surrogate pair"
            raise InvalidRequest("grammar", message) from error
        if size > MAX_BYTES:
            raise InvalidRequest("grammar", f"the grammar has {size} bytes, at most {MAX_BYTES} are accepted")
        if not self._places.acquire(blocking=False):
            raise EngineBusy(f"{MAX_WAITING} other grammars wait to be compiled; try again later")
        try:
            with self._lock:
                if text not in self._known:
                    self._try(text)
                    self._known[text] = None
                    if len(self._known) > _KNOWN:
                        self._known.popitem(last=False)
        finally:
            self._places.release()

    def close(self) -> None:
        """End the child. A later check starts another."""
        with self._lock:
            self._end()

    def _try(self, text: str) -> None:
        question = json.dumps(text).encode() + b"\n"
        child = self._child or self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(question)
            child.stdin.flush()
            answer = _read_line(child, SECONDS)
        except TimeoutError:
            self._end()
            message = f"the grammar takes more than {SECONDS:g} s to compile; make it simpler"
            raise InvalidRequest("grammar", message) from None
        except OSError:
            self._end()
            message = "the grammar is too large, or its rules refer to each other too deeply, to be compiled"
            raise InvalidRequest("grammar", message) from None
        if answer:
            raise InvalidRequest("grammar", answer)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "coterie.engine.grammar_check"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._child = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        assert self._child.stdin is not None
        special = {str(token): text for token, text in self._outline.special.items()}
        self._child.stdin.write(json.dumps([self._outline.size, special]).encode() + b"\n")
        self._child.stdin.flush()
        _read_line(self._child, _START_SECONDS)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _read_line(child: subprocess.Popen[bytes], seconds: float) -> str:
    """The child's next answer. Raises `TimeoutError`, or `OSError` if it is dead."""
    assert child.stdout is not None
    deadline, data = time.monotonic() + seconds, b""
    while not data.endswith(b"\n"):
        readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        piece = os.read(child.stdout.fileno(), 65536)
        if not piece:
            raise OSError("the child is gone")
        data += piece
    return str(json.loads(data))


class _Bytes:
    """The bytes and the special tokens, as llguidance asks for a vocabulary; ids that are neither are empty."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, special: Mapping[str, str]) -> None:
        named = {int(token): text.encode() for token, text in special.items()}
        self.size = max(size, 257)
        plain = [token for token in range(self.size) if token not in named][:256]
        self._ids = dict(enumerate(plain))
        self.eos_token_id = max(named, default=self.size - 1)
        self.special_token_ids = sorted({*named, self.eos_token_id})
        spelled = {token: bytes([byte]) for byte, token in self._ids.items()} | named
        self.tokens = [spelled.get(token, b"") for token in range(self.size)]

    @property
    def byte_ids(self) -> list[int]:
        """The ids of all bytes."""
        return list(self._ids.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def _walk(native: llguidance.LLMatcher, tokens: Sequence[int]) -> None:
    """Take some of `tokens` that the grammar allows, from several beginnings: what is too large for a step shows with
    the first few. Ends where an error does."""
    for number in range(_WALKS):
        native.reset()
        for step in range(_STEPS):
            if native.is_error() or native.is_stopped():
                break
            mask = native.compute_bitmask()
            allowed = [token for token in tokens if mask[token // 8] >> token % 8 & 1]
            if native.is_error() or not allowed:
                break
            place = number * (len(allowed) - 1) // (_WALKS - 1) if step == 0 else step * 7919 % len(allowed)
            native.consume_token(allowed[place])
        if native.is_error():
            return


def main() -> None:
    """The child: the outline, then a text a line on stdin, what is wrong with it a line on stdout; all are JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spelling = _Bytes(*json.loads(sys.stdin.buffer.readline()))
    vocabulary = llguidance.LLTokenizer(
        spelling,  # type: ignore[arg-type]
        n_vocab=spelling.size,
        eos_token=[spelling.eos_token_id],
    )
    print('""', flush=True)
    for line in sys.stdin.buffer:
        signal.alarm(math.ceil(2 * SECONDS))  # should the parent be gone, nobody else ends a trial
        native = llguidance.LLMatcher(vocabulary, json.loads(line), log_level=0, limits=parser_limits())
        _walk(native, spelling.byte_ids)
        error = in_words(native.get_error()) if native.is_error() else ""
        signal.alarm(0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=main)
    worker.start()
    worker.join()
