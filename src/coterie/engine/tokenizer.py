"""Tokenizer: `tokenizer.json` read by the `tokenizers` library, with the rules that lie in the files beside it (or in
a GGUF file).

Text to ids follows the files: the post-processor, then `add_bos_token` and `add_eos_token` where tokenizer_config.json
sets them. Ids to text goes through bytes (`id_to_bytes`), so that streaming and whole decoding are the same function;
only decoders that are neither byte-level nor SentencePiece-like ask the library. Templates are not rendered here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers

from coterie.engine.errors import InvalidRequest
from coterie.model.gguf_tokenizer import TokenizerFiles
from coterie.spec.errors import CoterieError

TextForm = Literal["byte_level", "sentencepiece", "other"]


class Tokenizer:
    """One model's vocabulary and its rules. Stateless after construction; safe to share between threads.

    `form`: how tokens spell bytes. "byte_level" (GPT-2's alphabet), "sentencepiece" (`▁` for a space, `<0xE6>` for a
    byte), or "other", whose text is what the library decodes.
    """

    def __init__(self, source: str | Path | TokenizerFiles) -> None:
        folder = None if isinstance(source, TokenizerFiles) else Path(source)
        files = source if isinstance(source, TokenizerFiles) else read_files(Path(source))
        description, config = files.description, files.config
        try:
            if folder is None:
                self._library = tokenizers.Tokenizer.from_str(json.dumps(description))
            else:
                self._library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            name = "the tokenizer of the GGUF file" if folder is None else folder / "tokenizer.json"
            raise CoterieError(f"{name} is not a tokenizer: {error}") from error
        self.form: TextForm = text_form(description.get("decoder"))
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(t["id"] for t in description.get("added_tokens", []) if t.get("special"))
        self.bos_token = token_text(config.get("bos_token"))
        self.eos_token = token_text(config.get("eos_token"))
        self.bos_token_id = self.token_id(self.bos_token)
        self.eos_token_id = self.token_id(self.eos_token)
        self.chat_template = chat_template(folder, config)
        self._bytes: dict[int, bytes] = {}
        self._add_bos = added_token_rule(config.get("add_bos_token"), self.bos_token_id)
        self._add_eos = added_token_rule(config.get("add_eos_token"), self.eos_token_id)

    def token_id(self, text: str | None) -> int | None:
        """The id of a token by its exact text, None if there is none."""
        return None if text is None else self._library.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. A rendered chat template already holds its special tokens: encode it with `False`.

        Other threads run meanwhile. Raises `InvalidRequest` for a text with half a surrogate pair, which is no Unicode.
        """
        try:
            # The batch call lets go of the interpreter (the plain one stops every thread for seconds on a long text)
            # and the fast one leaves out offsets, which nobody reads.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise no_unicode(text) from error
        ids: list[int] = encoding.ids
        if not add_special_tokens or (self._add_bos is None and self._add_eos is None):
            return ids
        return self._apply_rules(ids, self._library.num_special_tokens_to_add(False))

    def _apply_rules(self, ids: list[int], extra: int) -> list[int]:
        """What the post-processor made (`ids`, `extra` of them its own), with bos and eos as the config wants them."""
        has_bos = extra > 0 and ids[:1] == [self.bos_token_id]
        has_eos = extra > int(has_bos) and ids[-1:] == [self.eos_token_id]
        if self._add_bos is True and not has_bos:
            ids = [self.bos_token_id or 0, *ids]
        elif self._add_bos is False and has_bos:
            ids = ids[1:]
        if self._add_eos is True and not has_eos:
            ids = [*ids, self.eos_token_id or 0]
        elif self._add_eos is False and has_eos:
            ids = ids[:-1]
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary give nothing."""
        ids = [i for i in token_ids if not (skip_special_tokens and i in self.special_ids)]
        if self.form == "other":
            return self._library.decode([i for i in ids if self.has_id(i)], skip_special_tokens=False)
        text = b"".join(map(self.id_to_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.form == "sentencepiece" else text

    def has_id(self, token_id: int) -> bool:
        """Whether the vocabulary holds the id: a model's embedding may be padded past it."""
        return self._library.id_to_token(token_id) is not None

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._library.id_to_token(token_id)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text; empty for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if self.form == "byte_level":
            return spell_byte_level(token)
        if self.form == "sentencepiece":
            return spell_sentencepiece(token)
        return self._library.decode([token_id], skip_special_tokens=False).encode()


def no_unicode(text: str) -> InvalidRequest:
    """What is wrong with a text that cannot be encoded: Python keeps bytes that were no UTF-8 as lone surrogates."""
    at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    shown = ascii(text[at : at + 1])
    return InvalidRequest(
        "prompt", f"the text is not valid Unicode: {shown} at character {at} is half a surrogate pair, or a stray byte"
    )


def read_files(folder: Path) -> TokenizerFiles:
    """The files of a folder."""
    description = read_json(folder / "tokenizer.json")
    if description is None:
        raise CoterieError(f"{folder} has no tokenizer.json; this model takes token ids only")
    return TokenizerFiles(description, read_json(folder / "tokenizer_config.json") or {})


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The folder's tokenizer, or None if it has none."""
    return Tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None


def eos_token_ids(
    folder: str | Path | None, from_config: Iterable[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """Every id that ends an answer: of config.json, generation_config.json and tokenizer_config.json together."""
    found = set(from_config)
    if folder is not None:
        named = (read_json(Path(folder) / "generation_config.json") or {}).get("eos_token_id")
        found.update(named if isinstance(named, list) else [named] if isinstance(named, int) else [])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in found if 0 <= i < vocab_size))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, None if there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CoterieError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CoterieError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json, which is a string or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def added_token_rule(flag: Any, token_id: int | None) -> bool | None:
    """An `add_*_token` flag; None (the post-processor decides) if it is absent or there is no such token to add."""
    return flag if isinstance(flag, bool) and (token_id is not None or not flag) else None


def chat_template(folder: Path | None, config: Mapping[str, Any]) -> str | None:
    """The chat template's source: its own file, else tokenizer_config.json's (the one named "default" of several)."""
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def text_form(decoder: Mapping[str, Any] | None) -> TextForm:
    """How the tokens of a `decoder` section spell bytes."""
    steps = list(_flatten(decoder))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return "byte_level"
    replaces = any(s.get("type") == "Replace" and s.get("pattern") == {"String": "▁"} for s in steps)
    if "ByteFallback" in kinds and replaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "sentencepiece"
    return "other"


def _flatten(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", []):
            yield from _flatten(step)
    else:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTE_ALPHABET = _byte_alphabet()


def spell_byte_level(token: str) -> bytes:
    """A token in GPT-2's alphabet as bytes; one with any other character (an added token) is its own text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def spell_sentencepiece(token: str) -> bytes:
    """`<0xE6>` is a byte, `▁` a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("▁", " ").encode()
