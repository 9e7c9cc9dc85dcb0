"""The grammar of an answer: thinking first if the model does, then what the request's structure or forced tools say.

Texts only (`engine.grammar_text`); the engine compiles and enforces them. Tags that the vocabulary calls special are
spelled by their ids, all others as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.engine import grammar_text
from coterie.server.errors import bad_request
from coterie.server.formats import Tags, Tool, ToolFormat, loosened
from coterie.server.parsers import Start
from coterie.server.structured import Structure
from coterie.server.tools import ToolUse

if TYPE_CHECKING:
    from coterie.engine.tokenizer import Tokenizer

_ANY = r"(.|\n)*"
Spell = Callable[[str], str]
"""A text as a part of a Lark rule."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an answer begins: the tags of thinking, if the model has any, and whether it thinks."""

    thinking: Tags | None
    start: Start


def answer_grammar(
    structure: Structure | None, use: ToolUse | None, form: ToolFormat, opening: Opening, tokenizer: Tokenizer
) -> Structure | None:
    """What the answer must follow, None if it is free. Forced calls win over a structure; where the model may choose,
    it calls or follows the structure, and without one writes what it likes until a call begins, which is then held to
    the format, and to the schema of a strict tool; if there may be one call only, the answer ends with it."""
    before, helpers = _thinking(opening, tokenizer)
    if use is None:
        if structure is None or not before:
            return structure
        return Structure(_with_body(f"start: {before} @body\n{helpers}", structure), structure.field)
    if not use.forced and structure is None:
        if use.many and not use.is_strict:
            return None
        return Structure(_triggered(use, form, opening, before, tokenizer) + helpers, "tools")
    calls = _calls(use.forced or tuple(use.tools.values()), form, speller(tokenizer), many=use.many)
    if use.forced or structure is None:
        return Structure(f"start: {before} calls\n{helpers}{calls}", "tools")
    return Structure(_with_body(f"start: {before} (calls | @body)\n{helpers}{calls}", structure), structure.field)


def _with_body(rules: str, structure: Structure) -> str:
    try:
        return grammar_text.composed(rules, structure.grammar)
    except ValueError as error:
        raise bad_request(f"{structure.field}: {error}; send Lark", param=structure.field) from error


def speller(tokenizer: Tokenizer) -> Spell:
    """How a text is spelled so that it can be generated."""

    return lambda text: " ".join(_parts(text, tokenizer))


def _parts(text: str, tokenizer: Tokenizer) -> list[str]:
    """A text as literals and special tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.special_ids.isdisjoint(ids):
        return [grammar_text.literal(text)]
    by_text = {tag: token for token, tag in special_in(tokenizer, text).items()}
    parts = re.split("(" + "|".join(map(re.escape, by_text)) + ")", text)
    return [f"<[{by_text[part]}]>" if part in by_text else grammar_text.literal(part) for part in parts if part]


def special_in(tokenizer: Tokenizer, text: str) -> dict[int, str]:
    """Special tokens that spell a part of a text, with their own text."""
    ids = tokenizer.special_ids.intersection(tokenizer.encode(text, add_special_tokens=False))
    return {token: tokenizer.id_to_token(token) or "" for token in ids}


def _thinking(opening: Opening, tokenizer: Tokenizer) -> tuple[str, str]:
    """What comes before the answer proper, as a part of a rule and the rules that it needs."""
    tags = opening.thinking
    if tags is None or opening.start == "answer":
        return "", ""
    gap = "thought_gap: /\\n{0,3}/\n"
    if special_in(tokenizer, tags.close) or special_in(tokenizer, tags.open):
        spell = speller(tokenizer)
        inner, helpers = f"/(.|\\n)*/ {spell(tags.close)}", gap
        opened = f"/\\n{{0,3}}/ {spell(tags.open)} {inner}"
    else:
        end = r"(.|\n)*" + _pattern(tags.close)
        start = r"\n{0,3}" + _pattern(tags.open) if opening.start == "open" else ""
        inner = opened = "thought"
        helpers = f"thought[lazy]: /{start}{end}/\n{gap}"
    return (f"{inner} thought_gap" if opening.start == "thinking" else f"({opened} thought_gap)?"), helpers


def _pattern(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def _triggered(use: ToolUse, form: ToolFormat, opening: Opening, before: str, tokenizer: Tokenizer) -> str:
    """Rules of an answer that is free until the tag that begins a call, or a section of them: from there on it is one.

    The text before a tag is one lexeme with it, which ends with the first tag; where the tag, or a part of it, is a
    special token, no text can hold it. Text that begins with an opening tag of thinking is a thought, if it may be.
    """
    tag = (form.call if form.section is None else form.section).open
    parts = _parts(tag, tokenizer)
    text = "" if parts[0].startswith("<[") else json.loads(parts.pop(0))
    tags = opening.thinking if opening.start == "open" else None
    is_no_thought = "" if tags is None else f" & ~/\\s*{_pattern(tags.open)}{_ANY}/"
    lead = f"lead{'' if parts else '[lazy]'}: LEAD\nLEAD: /{_ANY}{_pattern(text)}/{is_no_thought}\n"
    begun = " ".join(["lead", *parts, "calls"])
    body = f"({begun})* free" if use.many else f"({begun} | free)"
    tools = tuple(tool if tool.strict else loosened(tool, form) for tool in use.tools.values())
    calls = _calls(tools, form, speller(tokenizer), many=use.many, begun=True)
    return f"start: {before} {body}\nfree: /{_ANY}/\n{lead}{calls}"


def _calls(tools: Sequence[Tool], form: ToolFormat, spell: Spell, *, many: bool, begun: bool = False) -> str:
    """Rules of one call or several. `begun`: the first tag is already there, and text comes between calls without a
    section.

    A separator is one lexeme with what follows it: the lexer takes the longest and never goes back.
    """
    rules, ends = [], dict[str, str]()
    for i, tool in enumerate(tools):
        opening, rest = _call(tool, form, spell, ends)
        first = opening.removeprefix(form.call.open) if begun and form.section is None else opening
        rules += [f"first_{i}: {spell(first)} rest_{i}", f"next_{i}: {spell(form.separator + opening)} rest_{i}"]
        rules.append(f"rest_{i}: {rest}")
    inner = f"({' | '.join(f'first_{i}' for i in range(len(tools)))})"
    if many and not (begun and form.section is None):
        inner += f" ({' | '.join(f'next_{i}' for i in range(len(tools)))})*"
    if form.section is not None:
        before, after = form.section_padding
        opened = before if begun else form.section.open + before
        inner = f"{spell(opened) if opened else ''} {inner} {spell(after + form.section.close)}"
    return "\n".join([f"calls: {inner}", *rules, *ends.values()]) + "\n"


def _call(tool: Tool, form: ToolFormat, spell: Spell, ends: dict[str, str]) -> tuple[str, str]:
    """The text that a call begins with, and the rest of its rule. Neighbouring texts are joined: they are one for the
    tokenizer. `ends`: rules of texts up to a tag, by tag, to which new ones are added."""
    opening: str | None = None
    parts: list[str] = []
    text = form.call.open
    for piece in form.force(tool):
        if piece.kind == "text":
            text += piece.text
            continue
        if opening is None:
            opening = text
        elif text:
            parts.append(spell(text))
        parts.append(piece.text if piece.kind == "rule" else _until(piece.text, spell, ends))
        text = ""
    text += form.call.close
    if opening is None:  # a tool without parameters may be nothing but text
        opening, text = text.removesuffix(form.call.close), form.call.close
    return opening, " ".join([*parts, spell(text)])


def _until(tag: str, spell: Spell, ends: dict[str, str]) -> str:
    """Any text up to and with a tag, as a part of a rule."""
    if "<[" in spell(tag):  # a special token cannot be a part of a lexeme
        return f"/[^<]*/ {spell(tag)}"
    name = f"until_{list(ends).index(tag) if tag in ends else len(ends)}"
    ends[tag] = rf"{name}[lazy]: /(.|\n)*{_pattern(tag)}/"
    return name
