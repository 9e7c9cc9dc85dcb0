"""The tokenizer inside a GGUF file as the `tokenizer.json` and `tokenizer_config.json` that mean the same.

Two models: `gpt2` (byte-level BPE with merges, split by the rule that `tokenizer.ggml.pre` names) and `llama`
(SentencePiece BPE: merges follow from the scores). Others, and splitting rules we do not know, are refused by name.
Text in, values out: the `tokenizers` library is only met in `engine/tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.model.safetensors_io import LoadError

_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATER = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}"
)
"""Cased letters that DeepSeek's list of ranges leaves out."""
_CAPS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPS}]*[{_SMALL}]+|[^\r\n\p{{L}}\p{{N}}]?[{_CAPS}]+[{_SMALL}]*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_CAPS}&&[^\p{{Han}}]]*[{_SMALL}&&[^\p{{Han}}]]+{_SHORT}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPS}&&[^\p{{Han}}]]+[{_SMALL}&&[^\p{{Han}}]]*{_SHORT}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_LATER}]]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one `tokenizer.ggml.pre` splits text. `whole_words`: a word that is a token is not put together by merges."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    normal: str | None = None


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo"), _Rule((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Rule((r"\p{N}", _GPT2))),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2"),
        _Rule((_WORDS % "1,3",), whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Rule((_WORDS % "1",), normal="NFC")),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _Rule((_WORDS % "1,3",), whole_words=True)),
    "tekken": _Rule((_TEKKEN,), whole_words=True, adds_bos=True),
    "deepseek-llm": _Rule(_DEEPSEEK),
    "deepseek-coder": _Rule(_DEEPSEEK_CODER),
    "deepseek-v3": _Rule(_DEEPSEEK3),
    "kimi-k2": _Rule((_KIMI,)),
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a Hugging Face folder would hold: the parsed tokenizer.json and tokenizer_config.json."""

    description: dict[str, Any]
    config: dict[str, Any]


def tokenizer_of(metadata: Mapping[str, Any], file: str) -> TokenizerFiles | None:
    """The tokenizer of a GGUF file; None if it has none. Raises `LoadError` for one that cannot be rebuilt."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise LoadError(f"{file}: tokenizer.ggml.tokens is no list of texts: damaged")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise LoadError(f"{file}: tokenizer.ggml.token_type does not fit its {len(tokens)} tokens: damaged")
    vocabulary: dict[str, int] = {}
    for index, (token, sort) in enumerate(zip(tokens, kinds, strict=True)):
        if sort != _UNUSED:
            vocabulary.setdefault(token, index)
    if kind == "gpt2":
        description, adds_bos = _byte_level(metadata, vocabulary, file)
    elif kind == "llama":
        description, adds_bos = _sentencepiece(metadata, tokens, vocabulary, file)
    else:
        raise LoadError(f"{file}: tokenizer model {kind!r} is not read from GGUF; gpt2 and llama are")
    description["added_tokens"] = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kinds[i] != _USER}
        for token, i in vocabulary.items() if kinds[i] in (_CONTROL, _USER, _UNKNOWN)
    ]  # fmt: skip
    return TokenizerFiles(description, _config(metadata, tokens, adds_bos=adds_bos))


def _config(metadata: Mapping[str, Any], tokens: list[str], *, adds_bos: bool) -> dict[str, Any]:
    def text(name: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    return {
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _description(model: dict[str, Any], normalizer: Any, pre: Any, decoder: Any) -> dict[str, Any]:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": pre, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], file: str) -> tuple[dict[str, Any], bool]:
    name = metadata.get("tokenizer.ggml.pre")
    rule = _RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        known = ", ".join(sorted(_RULES))
        raise LoadError(f"{file}: tokenizer.ggml.pre {name!r} is no splitting rule that is known; these are: {known}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise LoadError(f"{file}: tokenizer.ggml.merges is no list of pairs: damaged")
    pairs = [merge.split(" ") for merge in merges]
    known_pairs = [pair for pair in pairs if {*pair, "".join(pair)} <= vocabulary.keys()]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": rule.whole_words, "vocab": vocabulary, "merges": known_pairs,
    }  # fmt: skip
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    pre = {"type": "Sequence", "pretokenizers": [*splits, level]}
    normalizer = {"type": rule.normal} if rule.normal else None
    return _description(model, normalizer, pre, level), rule.adds_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], vocabulary: dict[str, int], file: str
) -> tuple[dict[str, Any], bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    numbers = isinstance(scores, list) and all(isinstance(score, int | float) for score in scores)
    if not isinstance(scores, list) or not numbers or len(scores) != len(tokens):
        raise LoadError(f"{file}: tokenizer.ggml.scores does not fit its {len(tokens)} tokens: damaged")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = {
        "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocabulary,
        "merges": _merges(vocabulary, scores),
    }  # fmt: skip
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]  # fmt: skip
    normalizer = {"type": "Sequence", "normalizers": steps}
    return _description(model, normalizer, None, {"type": "Sequence", "decoders": decoders}), True


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
    """The merges that make SentencePiece's choice: best-scored result first, then by the halves' ids."""
    found: list[tuple[float, int, int, list[str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, [token[:cut], token[cut:]]))
    found.sort(key=lambda item: item[:3])
    return [item[3] for item in found]
