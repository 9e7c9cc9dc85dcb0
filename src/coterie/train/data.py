"""Prepared text: documents split into training and held-out, tokenised once and kept in a folder; batches by step.

The held-out documents of a package are chosen by a hash of their name, so that a page is held out in all its languages.
A batch is a pure function of (seed, step, plan): a resumed run needs no sampler state. Folder: `tokenizer.json`,
`manifest.json`, and per register `NAME.train.npy`, `NAME.held.npy` (uint16 ids), `NAME.train.txt`, `NAME.held.txt`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from coterie.spec.errors import CoterieError
from coterie.train.config import Recipe, Source, Stage
from coterie.train.sources import Document, read_source
from coterie.train.tokenizer import ASSISTANT, BOS, EOS, USER, encode, train_tokenizer

Tokens = NDArray[np.uint16]
Progress = Callable[[str], None]
CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Register:
    """One register as the trainer and the evaluation read it."""

    name: str
    licence: str
    train: Tokens
    held: Tokens
    train_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """A prepared data folder. `chat` repeats part of the training text as conversations and has nothing held out."""

    folder: Path
    tokenizer: Tokenizer
    registers: tuple[Register, ...]
    chat: Tokens
    manifest: dict[str, Any]

    def text(self, register: str, part: str) -> bytes:
        """The plain text behind a register's tokens; `part` is "train" or "held"."""
        return (self.folder / f"{register}.{part}.txt").read_bytes()


def prepare(recipe: Recipe, folder: Path, recipe_folder: Path, progress: Progress = lambda _: None) -> Corpus:
    """Fetch, split and tokenise the recipe's text into `folder`, unless that was done for the same data plan."""
    key = hashlib.sha256(repr((recipe.data, recipe.model.vocab_size, recipe.seed)).encode()).hexdigest()
    manifest_file = folder / "manifest.json"
    if manifest_file.is_file() and json.loads(manifest_file.read_text("utf-8"))["plan"] == key:
        return load_corpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents: dict[Source, list[Document]] = {}
    for source in recipe.data.sources:
        progress(f"reading {source.register}")
        documents[source] = read_source(source, folder / "packages", recipe_folder)
    held_names = choose_held_out(documents, recipe.data.held_out)
    progress("training the tokenizer")
    train = {
        s: [d for d in docs if (s.package or s.register, d.name) not in held_names] for s, docs in documents.items()
    }
    share = recipe.data.tokenizer_bytes // len(documents)
    tokenizer = train_tokenizer(_samples(list(train.values()), share), recipe.model.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    manifest: dict[str, Any] = {"plan": key, "registers": {}}
    for source, docs in documents.items():
        progress(f"tokenising {source.register}")
        held = [d for d in docs if (source.package or source.register, d.name) in held_names]
        entry: dict[str, Any] = {"licence": source.licence, "held_documents": [d.name for d in held]}
        for part, chosen in (("train", train[source]), ("held", held)):
            entry[part] = _write_part(folder / f"{source.register}.{part}", chosen, tokenizer)
        manifest["registers"][source.register] = entry
    progress("writing conversations")
    chat = _conversations([d for docs in train.values() for d in docs], recipe, tokenizer)
    np.save(folder / f"{CHAT}.train.npy", chat)
    manifest["chat_tokens"] = len(chat)
    manifest_file.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """Open a prepared data folder."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    registers = tuple(
        Register(
            name,
            entry["licence"],
            np.load(folder / f"{name}.train.npy"),
            np.load(folder / f"{name}.held.npy"),
            entry["train"]["bytes"],
            entry["held"]["bytes"],
        )
        for name, entry in manifest["registers"].items()
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Corpus(folder, tokenizer, registers, np.load(folder / f"{CHAT}.train.npy"), manifest)


def choose_held_out(documents: dict[Source, list[Document]], share: float) -> set[tuple[str, str]]:
    """(package, document name) pairs whose texts make up at least `share` of each package's bytes, in hash order.

    Registers of one package are pages of one work in several languages: a page is held out in all or none.
    """
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for source, docs in documents.items():
        for document in docs:
            sizes[source.package or source.register][document.name] += len(document.text.encode())
    chosen: set[tuple[str, str]] = set()
    for package, names in sizes.items():
        if len(names) < 2:
            raise CoterieError(f"{package} has {len(names)} document; holding text out needs at least 2")
        wanted, taken = share * sum(names.values()), 0
        for name in sorted(names, key=lambda name: hashlib.sha256(f"{package}/{name}".encode()).digest()):
            if taken >= wanted:
                break
            if names[name] > 2 * wanted and len(names) > 20:
                continue
            chosen.add((package, name))
            taken += names[name]
    return chosen


def _samples(groups: Sequence[Sequence[Document]], share: int) -> Iterator[str]:
    """At most `share` characters of each group, spread over its documents."""
    for group in groups:
        total = sum(len(document.text) for document in group)
        for document in group:
            yield document.text[: max(1, len(document.text) * share // max(total, share))]


def _write_part(stem: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> dict[str, Any]:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False):
        ids += encoding.ids
        ids.append(EOS)
    np.save(f"{stem}.npy", np.array(ids, np.uint16))
    data = "".join(document.text for document in documents).encode()
    Path(f"{stem}.txt").write_bytes(data)
    return {
        "documents": len(documents),
        "bytes": len(data),
        "tokens": len(ids),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def _conversations(documents: Sequence[Document], recipe: Recipe, tokenizer: Tokenizer) -> Tokens:
    """Part of the text as turns: the user gives some lines, the assistant continues the document."""
    chance = random.Random(recipe.seed)
    ids: list[int] = []
    for document in documents:
        lines = [line for line in document.text.splitlines(keepends=True) if line.strip()]
        for start in range(0, len(lines), 120):
            if chance.random() < recipe.data.chat_share:
                ids += _one_conversation(lines[start : start + 120], chance, tokenizer)
    return np.array(ids, np.uint16)


def _one_conversation(lines: list[str], chance: random.Random, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    at = 0
    while at < len(lines):
        asked, at = _take(lines, at, chance.randint(20, 160))
        answered, at = _take(lines, at, chance.randint(200, 900))
        if answered:
            ids += [USER, *encode(tokenizer, asked.strip()), ASSISTANT, *encode(tokenizer, answered.strip()), EOS]
    return ids


def _take(lines: list[str], at: int, size: int) -> tuple[str, int]:
    taken: list[str] = []
    length = 0
    while at < len(lines) and length < size:
        taken.append(lines[at])
        length += len(lines[at])
        at += 1
    return "".join(taken), at


class Batches:
    """Training batches by step. Windows of one length cover every stream once before any is repeated."""

    def __init__(self, streams: Sequence[Tokens], seed: int, tokens_per_step: int) -> None:
        self.streams, self.seed, self.tokens_per_step = tuple(streams), seed, tokens_per_step
        self._turns = [np.flatnonzero(stream == USER) for stream in self.streams]
        self._windows = lru_cache(maxsize=2)(self._make_windows)

    def batch(self, step: int, length: int) -> NDArray[np.int64]:
        """[tokens_per_step / length, length + 2]: `<|bos|>` and length + 1 tokens of a stream, for one step."""
        count = self.tokens_per_step // length
        rows = []
        for number in range(step * count, (step + 1) * count):
            per_epoch = len(self._windows(length, 0))
            epoch, index = divmod(number, per_epoch)
            stream, start = self._windows(length, epoch)[index]
            start = self._at_turn(stream, start, length)
            rows.append(np.concatenate([[BOS], self.streams[stream][start : start + length + 1]]))
        return np.stack(rows).astype(np.int64)

    def _at_turn(self, stream: int, start: int, length: int) -> int:
        """The next `<|user|>` at or after `start`, so that a window of conversations begins as a served one does."""
        turns = self._turns[stream]
        index = int(np.searchsorted(turns, start))
        room = len(self.streams[stream]) - length - 1
        return int(turns[index]) if index < len(turns) and turns[index] <= room else int(start)

    def _make_windows(self, length: int, epoch: int) -> NDArray[np.int64]:
        """(stream, start) of an epoch's windows, shuffled; the streams are cut at a new offset each epoch."""
        generator = np.random.default_rng((self.seed, length, epoch))
        pairs = []
        for number, stream in enumerate(self.streams):
            room = len(stream) - length - 1
            if room < 0:
                continue
            offset = int(generator.integers(0, min(length, room + 1)))
            count = (len(stream) - 1) // length - 1
            starts = np.minimum(offset + np.arange(max(count, 1)) * length, room)
            pairs.append(np.stack([np.full(len(starts), number), starts], 1))
        if not pairs:
            raise CoterieError(f"no register has the {length + 1} tokens that one window of the recipe needs")
        return generator.permutation(np.concatenate(pairs))


def stage_length(stages: Sequence[Stage], step: int, total_steps: int) -> int:
    """Sequence length at a step of a run of `total_steps`."""
    return [stage.length for stage in stages if step >= stage.start * total_steps][-1]
