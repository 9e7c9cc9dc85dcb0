"""Small tokenizer folders for tests: every byte a token, SentencePiece with byte fallback, whole words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from coterie.engine.tokenizer import BYTE_ALPHABET


def byte_tokenizer(folder: Path, **config: Any) -> Path:
    """Ids 0-255 are the bytes, 256 `<|bos|>`, 257 `<|end|>`; `config` goes to tokenizer_config.json."""
    tokenizer = Tokenizer(BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|end|>", special=True)])
    return _write(folder, tokenizer, {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}} | config)


def sentencepiece_tokenizer(folder: Path) -> Path:
    """A Llama-style vocabulary: `▁` for a space and `<0x..>` for the rest."""
    words = ["<unk>", "▁hello", "▁world", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _write(folder, tokenizer, {})


def word_tokenizer(folder: Path) -> Path:
    """Whole words, no decoder: the library joins them with spaces."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "one", "two", "three"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return _write(folder, tokenizer, {})


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
