"""Text in, batches out: what is held out, what a window holds, what the tokenizer keeps, how markup is stripped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.tiny import write_recipe
from tokenizers import Tokenizer

from coterie.spec.errors import CoterieError
from coterie.train.config import RecipeError, Source, Stage, load_recipe, model_spec
from coterie.train.data import Batches, choose_held_out, prepare, stage_length
from coterie.train.sources import Document, cut_pieces, read_source, strip_html, strip_wikitext
from coterie.train.tokenizer import ASSISTANT, BOS, EOS, SPECIAL_TOKENS, USER, encode, train_tokenizer

TOKENIZER: Tokenizer = train_tokenizer(["the quick brown fox " * 50, "Тест 测试\n    return 42\n" * 50], 300)


@given(st.text(max_size=200))
@settings(max_examples=200)
def test_tokenizer_keeps_every_text(text: str) -> None:
    ids = encode(TOKENIZER, text)
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_their_ids_and_bos_comes_first() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(6))
    assert TOKENIZER.encode("fox").ids[0] == BOS
    assert TOKENIZER.get_vocab_size() == 300


def test_held_out_documents_are_disjoint_and_in_no_training_text(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path))
    corpus = prepare(recipe, tmp_path / "data", tmp_path)
    for register in corpus.registers:
        held, train = corpus.text(register.name, "held"), corpus.text(register.name, "train")
        assert len(held) == register.held_bytes
        assert 0.05 <= len(held) / (len(held) + len(train)) < 0.4
        assert held[:200] not in train
        decoded = corpus.tokenizer.decode(register.held.tolist(), skip_special_tokens=True)
        assert decoded.encode() == held
    chat = corpus.chat
    assert (chat == USER).sum() == (chat == ASSISTANT).sum() == (chat == EOS).sum() > 10
    again = prepare(recipe, tmp_path / "data", tmp_path)
    assert np.array_equal(again.registers[0].train, corpus.registers[0].train)


def test_a_page_is_held_out_in_all_its_languages() -> None:
    def pages(language: str) -> tuple[Source, list[Document]]:
        source = Source(register=language, kind="deb", licence="", package="manual", member=language)
        return source, [Document(f"{n}.html", f"{language} {n} " * (n + 5)) for n in range(50)]

    documents = dict([pages("en"), pages("de")])
    chosen = choose_held_out(documents, 0.1)
    assert {package for package, _ in chosen} == {"manual"}
    held = sum(len(d.text) for docs in documents.values() for d in docs if ("manual", d.name) in chosen)
    assert 0.1 <= held / sum(len(d.text) for docs in documents.values() for d in docs) < 0.2


def test_an_epoch_shows_every_window_once_and_windows_follow_the_stream() -> None:
    streams = [np.arange(10, 1010, dtype=np.uint16), np.arange(2000, 2300, dtype=np.uint16)]
    batches = Batches(streams, seed=1, tokens_per_step=64)
    per_epoch = len(batches._windows(16, 0))
    rows = np.concatenate([batches.batch(step, 16) for step in range(per_epoch // 4)])
    assert rows.shape[1] == 18
    assert (rows[:, 0] == BOS).all()
    assert (np.diff(rows[:, 1:]) == 1).all()
    assert len(set(rows[:, 1].tolist())) == len(rows)
    assert len(np.unique(rows[:, 1:-1])) > 0.9 * 1300
    assert np.array_equal(batches.batch(3, 16), Batches(streams, 1, 64).batch(3, 16))
    assert not np.array_equal(batches.batch(3, 16), Batches(streams, 2, 64).batch(3, 16))


def test_conversation_windows_begin_at_a_turn() -> None:
    stream = np.tile(np.array([USER, 50, 51, ASSISTANT, 52, 53, 54, EOS], np.uint16), 40)
    rows = Batches([stream], 0, 64).batch(0, 16)
    assert (rows[:, 1] == USER).all()


def test_a_stream_shorter_than_a_window_is_said() -> None:
    with pytest.raises(CoterieError, match="33 tokens"):
        Batches([np.arange(20, dtype=np.uint16)], 0, 64).batch(0, 32)


def test_stages_follow_the_plan() -> None:
    stages = (Stage(start=0.0, length=8), Stage(start=0.5, length=16))
    assert [stage_length(stages, step, 4) for step in range(4)] == [8, 8, 16, 16]


def test_html_keeps_paragraphs_and_drops_navigation() -> None:
    page = '<html><head><title>x</title></head><body><ul class="docnav"><li>Next</li></ul><p>One <b>two</b></p><div>three<br/>four &amp; five</div></body></html>'  # noqa: E501
    assert strip_html(page) == "One two\n\nthree\n\nfour & five\n".replace("three\n\nfour", "three\nfour")


def test_wikitext_keeps_words() -> None:
    text = "{{Infobox|a={{b}}}}'''Anarchism''' is a [[political philosophy|philosophy]].<ref>x</ref>\n{| class\n|-\n|}\n[[File:a.jpg|thumb|of [[x]]]]==See also==\n"  # noqa: E501
    assert strip_wikitext(text) == "Anarchism is a philosophy.\n\n==See also==\n"


def test_pieces_join_to_the_text() -> None:
    text = "line of text\n" * 5000
    pieces = list(cut_pieces(text))
    assert "".join(piece.text for piece in pieces) == text
    assert len({piece.name for piece in pieces}) == len(pieces) > 2


def test_the_library_register_is_code_in_a_fixed_order(tmp_path: Path) -> None:
    source = Source(register="python", kind="stdlib", licence="PSF-2.0", reader="python", max_bytes=300_000)
    first = read_source(source, tmp_path, tmp_path)
    assert [d.name for d in first] == [d.name for d in read_source(source, tmp_path, tmp_path)]
    assert 100_000 < sum(len(d.text.encode()) for d in first) <= 300_000
    assert all("/test/" not in d.name for d in first)


def test_recipes_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    file = write_recipe(tmp_path)
    good = file.read_text()
    for old, new, message in (
        ("tokens_per_step = 256", "tokens_per_step = 250", "multiple"),
        ("max_positions = 192", "max_positions = 48", "exceeds max_positions"),
        ("dense_layers = 1", "dense_layers = 3", "dense_layers"),
        ("hidden_size = 32", 'hidden_size = "x"', "hidden_size"),
        ('register = "code"', 'register = "verse"', "named once"),
    ):
        file.write_text(good.replace(old, new))
        with pytest.raises(RecipeError, match=message):
            load_recipe(file)
    with pytest.raises(RecipeError, match="no recipe nowhere"):
        load_recipe("nowhere")


def test_the_demo_recipe_is_what_the_issue_asks() -> None:
    spec = model_spec(load_recipe("demo").model)
    routed = [moe for _, moe in spec.moe_layers()]
    assert len(spec.layers) - len(routed) == 1
    assert {(m.num_experts, m.top_k, m.shared_intermediate_size // m.intermediate_size) for m in routed} == {(32, 4, 1)}
    assert all(moe.scoring == "sigmoid" and moe.correction_bias for moe in routed)
    assert len(spec.mtp_layers) == 1
    assert 2 * (spec.num_parameters + spec.num_mtp_parameters) < 19_700_000
