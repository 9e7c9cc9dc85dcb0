"""Prompts are real text of about the asked length, the same for the same seed, and mistakes in files are named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from timed_server import TimedServer, timetable
from tokenizers import Tokenizer

from coterie.loadgen.client import Client
from coterie.loadgen.connection import Address
from coterie.loadgen.prompts import (
    SHIPPED_TEXT,
    PromptPlan,
    cut_by_chars,
    cut_with_tokenizer,
    make_prompts,
    measure_chars,
)
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError


def test_exact_lengths_with_a_tokenizer_and_only_real_text() -> None:
    folder = Path(shipped_model_path())
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plan = PromptPlan(count=40, input_len=100, output_len=10, range_ratio=0.5, seed=4)
    prompts = make_prompts(plan, cut_with_tokenizer(folder))
    text = SHIPPED_TEXT.read_text()
    lengths = [len(library.encode(prompt.content, add_special_tokens=False).ids) for prompt in prompts]
    assert min(lengths) >= 48 and max(lengths) <= 152 and len(set(lengths)) > 15
    assert all(isinstance(prompt.content, str) and prompt.content[:100] in text + "\n" + text for prompt in prompts)
    assert len({prompt.content[:40] for prompt in prompts}) == 40
    assert all(5 <= prompt.output_len <= 15 for prompt in prompts)
    assert make_prompts(plan, cut_with_tokenizer(folder)) == prompts


def test_a_shared_prefix_and_lengths_by_characters() -> None:
    prompts = make_prompts(PromptPlan(count=5, input_len=50, prefix_len=30, seed=1), cut_by_chars(4.0))
    shared = [prompt.content[:115] for prompt in prompts]
    assert len(set(shared)) == 1
    assert len({prompt.content[160:] for prompt in prompts}) == 5
    assert all(320 <= len(prompt.content) <= 400 for prompt in prompts)


def test_random_ids_only_when_asked() -> None:
    prompts = make_prompts(PromptPlan(source="random", count=3, input_len=5, prefix_len=2, vocab_size=9), None)
    assert all(len(prompt.content) == 7 and set(prompt.content) <= set(range(9)) for prompt in prompts)
    assert len({tuple(prompt.content[:2]) for prompt in prompts}) == 1
    assert PromptPlan().source == "text"


def test_own_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"prompt": [1, 2], "output_tokens": 3}) + "\n")
    prompts = make_prompts(PromptPlan(source="custom", path=lines, count=3, output_len=8), None)
    assert [(prompt.content, prompt.output_len) for prompt in prompts] == [("a", 8), ([1, 2], 3), ("a", 8)]
    for text in ("", "{}", "[1]", "nothing"):
        lines.write_text(text)
        with pytest.raises(CoterieError, match=r"prompts\.jsonl"):
            make_prompts(PromptPlan(source="custom", path=lines), None)
    with pytest.raises(CoterieError, match="needs --dataset-path"):
        make_prompts(PromptPlan(source="custom"), None)
    lines.write_text("too short")
    for path in (lines, tmp_path / "nowhere"):
        with pytest.raises(CoterieError, match=path.name):
            make_prompts(PromptPlan(path=path), cut_by_chars(4.0))
    with pytest.raises(CoterieError, match="is not a tokenizer"):
        cut_with_tokenizer(lines)


def test_characters_a_token_are_measured_on_the_server() -> None:
    with TimedServer(timetable([0.0])) as server:
        assert asyncio.run(measure_chars(Client(Address.parse(server.url)), None)) == (5.0, "/tokenize")
    found = asyncio.run(measure_chars(Client(Address.parse(server.url)), None))
    assert found[0] == 4.0 and "guess" in found[1]
