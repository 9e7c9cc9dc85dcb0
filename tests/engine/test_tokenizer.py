"""Tokenizer: special tokens as the files say (once), eos ids from every file, decoding, templates, bad files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import tokenizers
from tiny_tokenizers import byte_tokenizer
from tokenizers.processors import TemplateProcessing

from coterie.engine.errors import InvalidRequest
from coterie.engine.tokenizer import Tokenizer, eos_token_ids, load_tokenizer, text_form
from coterie.spec.errors import CoterieError

BOS, END = 256, 257


def with_template(folder: Path) -> Path:
    """A post-processor that writes bos and eos by itself."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = TemplateProcessing(
        single="<|bos|> $A <|end|>", special_tokens=[("<|bos|>", BOS), ("<|end|>", END)]
    )
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        ({}, False, [65]),
        ({"add_bos_token": True}, False, [BOS, 65]),
        ({"add_bos_token": True, "add_eos_token": True}, False, [BOS, 65, END]),
        ({"add_bos_token": True}, True, [BOS, 65, END]),
        ({"add_bos_token": False}, True, [65, END]),
        ({"add_bos_token": False, "add_eos_token": False}, True, [65]),
        ({}, True, [BOS, 65, END]),
        ({"add_bos_token": True, "bos_token": None}, False, [65]),
        ({"add_bos_token": False, "bos_token": None}, False, [65]),
    ],
)
def test_special_tokens_once(tmp_path: Path, config: dict, template: bool, expected: list[int]) -> None:
    folder = byte_tokenizer(tmp_path, **config)
    tokenizer = Tokenizer(with_template(folder) if template else folder)
    assert tokenizer.encode("A") == expected
    assert tokenizer.encode("A", add_special_tokens=False) == [65]


def test_a_rendered_template_has_its_own_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path, add_bos_token=True))
    assert tokenizer.encode("<|bos|>A", add_special_tokens=False) == [BOS, 65]
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token_id) == ("<|bos|>", BOS, END)


def test_a_long_text_does_not_stop_other_threads(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    text = "ab " * 300_000
    begun, done = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        assert tokenizer.encode(text) == list(text.encode())
        done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    begun.wait()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    worker.join()
    # With the interpreter held there is one turn before the library is entered and one after it is left.
    assert turns > 10


def test_half_a_surrogate_pair_is_refused_with_its_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    for text in ("ab\ud83d", "ab\udcff c"):
        with pytest.raises(InvalidRequest, match=r"not valid Unicode: '\\ud(83d|cff)' at character 2") as caught:
            tokenizer.encode(text)
        assert caught.value.param == "prompt"
    assert tokenizer.encode("😀") == list("😀".encode())


def test_eos_of_every_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    assert eos_token_ids(tmp_path, (3,), tokenizer, 300) == (3, END)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 10**6]}))
    assert eos_token_ids(tmp_path, (3,), tokenizer, 300) == (3, 5, 9, END)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert eos_token_ids(tmp_path, (), None, 300) == (5,)
    assert eos_token_ids(None, (), None, 300) == ()


def test_ids_outside_the_vocabulary_are_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    assert tokenizer.decode([65, 9999, 66]) == "AB"
    assert not tokenizer.has_id(9999) and tokenizer.id_to_bytes(9999) == b""


def test_bytes_of_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    assert b"".join(tokenizer.id_to_bytes(i) for i in range(256)) == bytes(range(256))
    assert tokenizer.id_to_bytes(END) == b"<|end|>"


def test_chat_template_sources(tmp_path: Path) -> None:
    assert Tokenizer(byte_tokenizer(tmp_path)).chat_template is None
    assert Tokenizer(byte_tokenizer(tmp_path, chat_template="T")).chat_template == "T"
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    assert Tokenizer(byte_tokenizer(tmp_path, chat_template=named)).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer(tmp_path).chat_template == "F"


def test_missing_and_broken_files(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(CoterieError, match="token ids only"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CoterieError, match="is not a tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(CoterieError, match="is not JSON"):
        Tokenizer(tmp_path)


def test_text_forms() -> None:
    byte_level = {"type": "ByteLevel"}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    assert text_form(byte_level) == "byte_level"
    assert text_form({"type": "Sequence", "decoders": [byte_level, {"type": "Fuse"}]}) == "byte_level"
    assert text_form({"type": "Sequence", "decoders": steps}) == "sentencepiece"
    assert text_form({"type": "WordPiece"}) == text_form(None) == "other"
