"""Prompts of real text: windows of a text at random places, about as many tokens long as asked.

Real text because engines differ with it: drafts are accepted, experts are chosen and stops are found as they are in
use, which random ids hide. How many characters a token has is measured (a tokenizer, the server's /tokenize, or the
usage of one answer); what was really sent is counted by the server's usage. Random ids are there to be asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

from coterie.loadgen.client import Client, Prompt
from coterie.loadgen.connection import BadAnswer
from coterie.spec.errors import CoterieError

SHIPPED_TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "shakespeare.txt"
SAMPLE_CHARS = 1600
"""Of the text that is used to measure how long tokens are."""
USUAL_CHARS = 4.0

Source = Literal["text", "custom", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """`input_len`, `output_len`, `prefix_len` in tokens; lengths are uniform within `range_ratio` around them.

    source: text (windows of `path` or of the shipped text), custom (JSON lines with `prompt`, maybe `output_tokens`),
    random (ids below `vocab_size`). prefix_len: the first tokens are the same in all prompts.
    """

    source: Source = "text"
    path: Path | None = None
    count: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 0
    seed: int = 0


Cut = Callable[[str, int], str]
"""The beginning of a text that is so many tokens long."""


def make_prompts(plan: PromptPlan, cut: Cut | None) -> list[Prompt]:
    """All prompts, the same for the same seed. `cut` may be None for a source without windows. Raises CoterieError."""
    random = np.random.default_rng(plan.seed)
    inputs = _lengths(random, plan.input_len, plan)
    outputs = _lengths(random, plan.output_len, plan)
    if plan.source == "custom":
        return _custom(plan, outputs)
    if plan.source == "random":
        ids = [random.integers(0, plan.vocab_size, size=count).tolist() for count in [plan.prefix_len, *inputs]]
        return [Prompt(ids[0] + own, length) for own, length in zip(ids[1:], outputs, strict=True)]
    assert cut is not None
    text = read_text(plan.path or SHIPPED_TEXT)
    prefix = cut(_window(text, random), plan.prefix_len) if plan.prefix_len else ""
    return [
        Prompt(prefix + cut(_window(text, random), count), length)
        for count, length in zip(inputs, outputs, strict=True)
    ]


def _lengths(random: Generator, middle: int, plan: PromptPlan) -> list[int]:
    low, high = int(middle * (1 - plan.range_ratio)), int(middle * (1 + plan.range_ratio))
    return random.integers(max(1, low), max(1, high) + 1, size=plan.count).tolist()


def _window(text: str, random: Generator) -> str:
    """The text from the word after a random place on, going round at its end."""
    start = int(random.integers(0, len(text)))
    start = text.find(" ", start) + 1
    return text[start:] + "\n" + text[:start]


def read_text(path: Path) -> str:
    """A text file. Raises CoterieError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"cannot read the text {path}: {error}") from error
    if len(text) < 1000:
        raise CoterieError(f"{path} holds {len(text)} characters, too few to cut prompts from; give a longer text")
    return text


def _custom(plan: PromptPlan, outputs: list[int]) -> list[Prompt]:
    """The file's prompts in its order, from the start again if there are too few."""
    if plan.path is None:
        raise CoterieError("--dataset-name custom needs --dataset-path, a file of JSON lines with a prompt each")
    try:
        rows = [json.loads(line) for line in plan.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [(row["prompt"], row.get("output_tokens")) for row in rows]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CoterieError(f"{plan.path} is not JSON lines with a prompt each: {error}") from error
    if not found:
        raise CoterieError(f"{plan.path} holds no prompt")
    chosen = [found[i % len(found)] for i in range(plan.count)]
    return [Prompt(prompt, asked or length) for (prompt, asked), length in zip(chosen, outputs, strict=True)]


def cut_with_tokenizer(folder: Path) -> Cut:
    """Exact lengths in a tokenizer.json's tokens. Raises CoterieError."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        library = Tokenizer.from_file(str(file))
    except Exception as error:
        raise CoterieError(f"{file} is not a tokenizer: {error}") from error

    def cut(text: str, count: int) -> str:
        chars = 16 * count
        while True:
            ends = [end for _, end in library.encode(text[:chars], add_special_tokens=False).offsets]
            if len(ends) > count or chars >= len(text):
                return text[: ends[min(count, len(ends)) - 1]]
            chars *= 2

    return cut


def cut_by_chars(chars_per_token: float) -> Cut:
    """About so many tokens, ended at a word."""

    def cut(text: str, count: int) -> str:
        chars = max(1, round(count * chars_per_token))
        space = text.find(" ", chars)
        return text[: chars if space < 0 or space > chars + 40 else space]

    return cut


async def measure_chars(client: Client, path: Path | None) -> tuple[float, str]:
    """Characters a token of this text has on this server, and how that was found."""
    text = read_text(path or SHIPPED_TEXT)
    sample = text[len(text) // 2 :][:SAMPLE_CHARS]
    named = {} if client.model is None else {"model": client.model}
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/tokenize", {"prompt": sample, "add_special_tokens": False}),
        ("/v1/completions", {"prompt": sample, "max_tokens": 1}),
    )
    for where, body in asked:
        try:
            status, answer = await client.ask("POST", where, named | body)
            found = json.loads(answer) if status == 200 else {}
            count = int(found["count"] if "count" in found else found["usage"]["prompt_tokens"])
        except (OSError, BadAnswer, ValueError, LookupError, TypeError):
            continue
        if count > 0:
            return len(sample) / count, where
    return USUAL_CHARS, "a guess, as the server counts no tokens"
