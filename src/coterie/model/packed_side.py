"""The files beside packed weights: config.json, the tokenizer and its templates, copied from the source.

A GGUF file holds them inside; they are written as a Hugging Face folder would have them. Only these names are copied:
no weights, no code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from coterie.model.gguf import open_gguf
from coterie.model.gguf_file import find_gguf
from coterie.spec.errors import CoterieError

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
)


def write_side_files(source: Path, out: Path) -> None:
    """Write what a folder needs beside its weights. Raises `CoterieError` if the source has no config."""
    if find_gguf(source):
        model = open_gguf(source)
        _write_json(out / "config.json", model.config)
        if model.tokenizer is not None:
            _write_json(out / "tokenizer.json", model.tokenizer.description)
            _write_json(out / "tokenizer_config.json", model.tokenizer.config)
        return
    folder = source if source.is_dir() else source.parent
    if not (folder / "config.json").is_file():
        raise CoterieError(f"{folder} has no config.json")
    for name in SIDE_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
