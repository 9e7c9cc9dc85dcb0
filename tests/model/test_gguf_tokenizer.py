"""Tokenizers rebuilt from GGUF metadata: the same ids as the tokenizer they came from.

Byte-level BPE against the shipped model's own tokenizer.json, SentencePiece against a plain writing of its algorithm
(join the best-scored neighbours until none is left). The real file is in `test_gguf_smollm2.py`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import coterie
from coterie.engine.tokenizer import Tokenizer
from coterie.model.gguf_tokenizer import _RULES, tokenizer_of
from coterie.model.safetensors_io import LoadError

DEMO = Path(coterie.__file__).parent / "data" / "demo"
TEXTS = (
    "", "To be, or not to be: that is the question.", "  two  spaces\n\n\tand a tab ", "I'll don't WE'VE it's",
    "1234567 3.14159 x=-1", "été naïve Ünïcode", "中文字符和日本語の文", "emoji 👩‍🔬 🇫🇷", "<|bos|>begin<|eos|>",
    "def f(x):\r\n    return x**2  # why?\r\n", "\u00a0\u2003wide", "a" * 300, "\x00\x01\x7f",
)  # fmt: skip


def demo_metadata(**changes: object) -> dict:
    """The shipped tokenizer as a converter would write it."""
    description = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = {token: index for token, index in description["model"]["vocab"].items()}
    special = {token["content"]: token["id"] for token in description["added_tokens"]}
    by_id = {index: token for token, index in (vocabulary | special).items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(max(by_id) + 3)]
    kinds = [3 if token in special else 5 if token.startswith("[PAD") else 1 for token in tokens]
    merges = [" ".join(merge) for merge in description["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": "{{ messages }}",
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}  # fmt: skip


def rebuilt(metadata: dict) -> Tokenizer:
    files = tokenizer_of(metadata, "model.gguf")
    assert files is not None
    return Tokenizer(files)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_equals_the_shipped_tokenizer(text: str) -> None:
    ours, theirs = rebuilt(demo_metadata()), Tokenizer(DEMO)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_facts_beside_the_vocabulary() -> None:
    tokenizer = rebuilt(demo_metadata())
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.form) == ("<|bos|>", 1, "byte_level")
    assert tokenizer.chat_template == "{{ messages }}"
    assert {0, 1} <= tokenizer.special_ids
    assert not tokenizer.has_id(4097), "padding of the vocabulary is no token"
    assert rebuilt(demo_metadata(add_bos_token=False)).encode("a")[0] != 0
    assert tokenizer_of({}, "x") is None


@pytest.mark.parametrize("pre", sorted(_RULES))
def test_every_splitting_rule_is_one_that_the_library_takes(pre: str) -> None:
    tokenizer = rebuilt(demo_metadata(pre=pre))
    for text in TEXTS:
        if "<|" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(map(tokenizer.id_to_bytes, ids)).decode() == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("smollm", "x2024", ["x", "2", "0", "2", "4"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("deepseek-v3", "12345", ["123", "45"]),
    ],
)
def test_numbers_split_as_the_rule_says(pre: str, text: str, pieces: list[str]) -> None:
    """A vocabulary that would join anything: only the rule keeps digits apart."""
    tokens = sorted({*"0123456789xin", "Ġ", "in", *(str(i) for i in range(10_000))})
    merges = [f"{token[:cut]} {token[cut:]}" for token in tokens if len(token) > 1 for cut in range(1, len(token))]
    tokenizer = rebuilt(demo_metadata(pre=pre, tokens=tokens, token_type=[1] * len(tokens), merges=merges))
    found = [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert found == pieces


# ---- SentencePiece ---------------------------------------------------------------------------------------------------
PIECES = [
    "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlnortw", "▁t", "he", "▁the", "re",
    "ll", "hell", "ello", "▁hell", "▁hello", "or", "wor", "▁wor", "ld", "▁world", "▁▁", "er", "the", "[INST]",
]  # fmt: skip
SCORES = [0.0] * 3 + [0.0] * 256 + [-float((7 * i) % 31) for i in range(len(PIECES) - 259)]


def sentencepiece_metadata(**changes: object) -> dict:
    kinds = [2, 3, 3, *([6] * 256), *([1] * (len(PIECES) - 260)), 4]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}  # fmt: skip


def joined(text: str) -> list[int]:
    """SentencePiece's BPE: join the neighbours whose union scores best, leftmost first; letters fall back to bytes."""
    ids = {piece: index for index, piece in enumerate(PIECES)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [a + b for a, b in pairwise(symbols)]
        pairs = [(SCORES[ids[union]], -i) for i, union in enumerate(unions) if union in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result: list[int] = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result


@pytest.mark.parametrize("text", ["hello world", "the there other", "  the   hell", "wörld", "ello", "中", "the\nor"])
def test_sentencepiece_joins_by_score(text: str) -> None:
    tokenizer = rebuilt(sentencepiece_metadata())
    assert tokenizer.form == "sentencepiece"
    assert tokenizer.encode(text, add_special_tokens=False) == joined(text)
    assert tokenizer.encode(text) == [1, *joined(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_user_tokens_and_the_leading_space() -> None:
    tokenizer = rebuilt(sentencepiece_metadata())
    assert len(PIECES) - 1 in tokenizer.encode("[INST]the")
    assert len(PIECES) - 1 not in tokenizer.special_ids
    bare = rebuilt(sentencepiece_metadata(add_space_prefix=False))
    assert bare.encode("the", add_special_tokens=False) == [PIECES.index("the")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": []}, "no list of texts"),
        ({"tokens": [1, 2]}, "no list of texts"),
        ({"token_type": [1]}, "does not fit"),
        ({"merges": ["a"]}, "no list of pairs"),
        ({"merges": None}, "no list of pairs"),
        ({"pre": "default"}, "'default' is no splitting rule that is known; these are: chatglm-bpe"),
        ({"model": "bert"}, "'bert' is not read from GGUF"),
    ],
)
def test_what_cannot_be_rebuilt(changes: dict, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        tokenizer_of(demo_metadata(**changes), "model.gguf")
