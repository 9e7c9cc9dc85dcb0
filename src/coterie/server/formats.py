"""How families of models mark their thinking and their calls of tools: tags, how a call is read, how one is forced.

A value per family, chosen from the model's chat template or by name. Finding the tags is the part of `server.parsers`;
prompts are the template's. A call's reader gets the text between its tags and returns None for what is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from coterie.engine.grammar_text import json_part, literal
from coterie.server.config import ParserNames
from coterie.spec.errors import CoterieError

T = TypeVar("T")
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tags:
    """A pair of tags as they stand in an answer."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON schema of an object. `strict`: arguments must follow it
    even where the model may choose whether to call. any_order: so may pairs of tags come, and as often as they like."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    any_order: bool = False


Tools = Mapping[str, Tool]
"""By name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call; `arguments` is the JSON text of an object. `id` is the model's own, if its format has one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before a call's arguments, which begin at `end`."""

    name: str
    end: int
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as pairs of tags. `member`: a match of `pattern`, which ends with `closing`, as a member of a JSON
    object, knowing the tool."""

    pattern: re.Pattern[str]
    closing: str
    member: Callable[[re.Match[str], Tool | None], str]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`call`: the tags of one call. `section`: tags around all of them, if there are any. `separator`: between calls.

    read: the call between its tags, knowing the request's tools. force: what stands between them for a tool.
    head: what a call begins with; None while the text does not say. A JSON object follows it, or `pairs`.
    marks: texts that a template of this format holds. foreign: texts that it does not.
    """

    name: str
    call: Tags
    read: Callable[[str, Tools], Call | None]
    head: Callable[[str], Head | None]
    force: Callable[[Tool], Sequence[Piece]]
    marks: tuple[str, ...]
    section: Tags | None = None
    section_padding: tuple[str, str] = ("", "")
    separator: str = ""
    pairs: Pairs | None = None
    foreign: tuple[str, ...] = ()

    def is_written_by(self, template: str) -> bool:
        """Whether a chat template seems to write this format."""
        return all(mark in template for mark in self.marks) and not any(mark in template for mark in self.foreign)

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag, to be seen even if the vocabulary calls it special."""
        pairs = [self.call] if self.section is None else [self.call, self.section]
        return tuple(tag for pair in pairs for tag in (pair.open, pair.close))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a forced call: a text as it stands, a part of a Lark rule, or any text up to and with this one."""

    text: str
    kind: Literal["text", "rule", "until"] = "text"


def arguments_of(text: str) -> str | None:
    """The text without blanks around it if it is a JSON object, else None. Its spelling is the model's."""
    text = text.strip()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    return text if isinstance(value, dict) else None


def _called(name: str, arguments: str, call_id: str | None = None) -> Call | None:
    found = arguments_of(arguments)
    name = name.strip()
    return Call(name, found, call_id) if found is not None and FUNCTION_NAME.fullmatch(name) else None


def _headed(pattern: re.Pattern[str]) -> Callable[[str], Head | None]:
    """A head whose only group is the name."""

    def head(text: str) -> Head | None:
        found = pattern.match(text)
        return None if found is None else Head(found[1].strip(), found.end())

    return head


# {"name": ..., "arguments": ...}

_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


def _json_head(text: str) -> Head | None:
    """Only where the name comes first, as everybody writes it."""
    found = _JSON_HEAD.match(text)
    try:
        return None if found is None else Head(msgspec.json.decode(found[1], type=str).strip(), found.end())
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


def _read_json(body: str, tools: Tools) -> Call | None:
    text = body.strip()
    try:
        value = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(value.get("name", b"null"))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    arguments = bytes(value.get("arguments", value.get("parameters", b"{}"))).decode()
    return _called(name, arguments) if isinstance(name, str) else None


def _force_json(tool: Tool) -> list[Piece]:
    start = f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    return [Piece(start), Piece(json_part(tool.parameters), kind="rule"), Piece("}\n")]


# DeepSeek V3 and R1: a kind, the name and a fenced JSON text; V3.1: the name and a JSON text

_SEPARATOR = "<｜tool▁sep｜>"
_FENCED_HEAD = re.compile(rf"\w*{_SEPARATOR}([^\n]+)\n```json\n\s*(?=\{{)")
_SEPARATED_HEAD = re.compile(rf"(.*?){_SEPARATOR}\s*(?=\{{)", re.DOTALL)
_FENCED = re.compile(rf"\w*{_SEPARATOR}([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def _read_fenced(body: str, tools: Tools) -> Call | None:
    found = _FENCED.fullmatch(body)
    return None if found is None else _called(found[1], found[2])


def _force_fenced(tool: Tool) -> list[Piece]:
    start = f"function{_SEPARATOR}{tool.name}\n```json\n"
    return [Piece(start), Piece(json_part(tool.parameters), kind="rule"), Piece("\n```")]


def _read_separated(body: str, tools: Tools) -> Call | None:
    name, separator, arguments = body.partition(_SEPARATOR)
    return _called(name, arguments) if separator else None


def _force_separated(tool: Tool) -> list[Piece]:
    return [Piece(tool.name + _SEPARATOR), Piece(json_part(tool.parameters), kind="rule")]


# Kimi K2: functions.NAME:NUMBER and a JSON text

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(rf"(.*?){re.escape(_KIMI_ARGUMENTS)}\s*(?=\{{)", re.DOTALL)


def _kimi_name(call_id: str) -> str:
    return call_id.removeprefix("functions.").rpartition(":")[0]


def _kimi_head(text: str) -> Head | None:
    found = _KIMI_HEAD.match(text)
    return None if found is None else Head(_kimi_name(found[1].strip()).strip(), found.end(), found[1].strip())


def _read_kimi(body: str, tools: Tools) -> Call | None:
    call_id, separator, arguments = body.partition(_KIMI_ARGUMENTS)
    call_id = call_id.strip()
    return _called(_kimi_name(call_id), arguments, call_id) if separator else None


def _force_kimi(tool: Tool) -> list[Piece]:
    return [
        Piece(f"functions.{tool.name}:"),
        Piece("/[0-9]{1,3}/", kind="rule"),
        Piece(_KIMI_ARGUMENTS),
        Piece(json_part(tool.parameters), kind="rule"),
    ]


# DeepSeek V3.2 and V4: a tag for each parameter, raw text or JSON as its attribute says

_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)
_DSML_NAME = re.compile(r'([^"]+)">')


def _dsml_member(found: re.Match[str], tool: Tool | None) -> str:
    value = json.dumps(found[3], ensure_ascii=False) if found[2] == "true" else found[3].strip()
    return f"{json.dumps(found[1], ensure_ascii=False)}: {value}"


_DSML_PAIRS = Pairs(_PARAMETER, "</｜DSML｜parameter>", _dsml_member)


def _read_dsml(body: str, tools: Tools) -> Call | None:
    return _read_pairs(body, tools, _DSML_NAME, _DSML_PAIRS)


def _dsml_parameter(name: str, plain: bool) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{"true" if plain else "false"}">'


def _force_dsml(tool: Tool) -> list[Piece]:
    return [Piece(f'{tool.name}">\n'), *_force_members(tool, _dsml_parameter, "</｜DSML｜parameter>\n")]


# GLM 4.5 and later, Qwen3-Coder: the name, then pairs of tags. Only the tool's schema tells a string from JSON.

_GLM_NAME = re.compile(r"\s*([^\s<]+)")
_GLM_HEAD = re.compile(r"\s*([^\s<]+)(?=[\s<])")
_GLM_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CODER_NAME = re.compile(r"\s*<function=([^>]+)>")
_CODER_PAIR = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _schema_member(found: re.Match[str], tool: Tool | None) -> str:
    key = found[1].strip()
    return f"{json.dumps(key, ensure_ascii=False)}: {_value(found[2], tool, key)}"


_GLM_PAIRS = Pairs(_GLM_PAIR, "</arg_value>", _schema_member)
_CODER_PAIRS = Pairs(_CODER_PAIR, "</parameter>", _schema_member)


def _read_glm(body: str, tools: Tools) -> Call | None:
    return _read_pairs(body, tools, _GLM_NAME, _GLM_PAIRS)


def _read_coder(body: str, tools: Tools) -> Call | None:
    inner = body.rstrip()
    if not inner.endswith("</function>"):
        return None
    return _read_pairs(inner.removesuffix("</function>"), tools, _CODER_NAME, _CODER_PAIRS)


def _read_pairs(body: str, tools: Tools, head: re.Pattern[str], pairs: Pairs) -> Call | None:
    named = head.match(body)
    if named is None:
        return None
    tool = tools.get(named[1].strip())
    place, members = named.end(), []
    while found := pairs.pattern.match(body, place):
        members.append(pairs.member(found, tool))
        place = found.end()
    return None if body[place:].strip() else _called(named[1], "{" + ", ".join(members) + "}")


def _value(text: str, tool: Tool | None, key: str) -> str:
    """A text as JSON: a string where the schema says so or the text is no JSON."""
    declared = {} if tool is None else _properties(tool).get(key)
    if not (isinstance(declared, Mapping) and declared.get("type") == "string"):
        try:
            msgspec.json.decode(text.strip())
            return text.strip()
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _glm_parameter(name: str, plain: bool) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>"


def _force_glm(tool: Tool) -> list[Piece]:
    return [Piece(f"{tool.name}\n"), *_force_members(tool, _glm_parameter, "</arg_value>\n")]


def _coder_parameter(name: str, plain: bool) -> str:
    return f"<parameter={name}>\n"


def _force_coder(tool: Tool) -> list[Piece]:
    members = _force_members(tool, _coder_parameter, "\n</parameter>\n")
    return [Piece(f"\n<function={tool.name}>\n"), *members, Piece("</function>\n")]


def loosened(tool: Tool, form: ToolFormat) -> Tool:
    """A tool whose arguments need not follow its schema: any object, or declared parameters with any values. Whatever
    the schema says, this can be enforced."""
    if form.pairs is None:
        return Tool(tool.name, {"type": "object"})
    return replace(tool, any_order=True)


_PLAIN_KEYS = frozenset({"type", "title", "description", "default", "examples"})
_LENGTH_KEYS = _PLAIN_KEYS | {"minLength", "maxLength"}


def _properties(tool: Tool) -> Mapping[str, Any]:
    found = tool.parameters.get("properties")
    return found if isinstance(found, Mapping) else {}


def _force_members(tool: Tool, opening: Callable[[str, bool], str], closing: str) -> list[Piece]:
    """Each declared parameter at most once, in order. Strings are raw text, all else is JSON by its own schema."""
    if tool.any_order:
        return _any_members(tool, opening, closing)
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    required = tool.parameters.get("required") or ()
    pieces: list[Piece] = []
    for name, schema in _properties(tool).items():
        declared = _resolved(schema, shared)
        raw = _raw(declared, closing)
        as_json = [Piece(json_part({**declared, **shared}), kind="rule"), Piece(closing)]
        one = [Piece(opening(name, raw is not None)), *(raw or as_json)]
        pieces += one if name in required else [Piece("(", kind="rule"), *one, Piece(")?", kind="rule")]
    return pieces


def _any_members(tool: Tool, opening: Callable[[str, bool], str], closing: str) -> list[Piece]:
    """Any text as a value; where a tag says that it is JSON, any JSON."""
    pieces: list[Piece] = []
    for name in _properties(tool):
        pieces.append(Piece(" | " if pieces else "(", kind="rule"))
        pieces += [Piece(opening(name, True)), Piece(closing, kind="until")]
        if opening(name, False) != opening(name, True):
            value = [Piece(json_part({}), kind="rule"), Piece(closing)]
            pieces += [Piece(" | ", kind="rule"), Piece(opening(name, False)), *value]
    return [*pieces, Piece(")*", kind="rule")] if pieces else []


def _resolved(schema: Any, shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the definition that it is nothing but a reference to."""
    if not isinstance(schema, Mapping):
        return {}
    reference = schema.get("$ref")
    place, _, name = reference.rpartition("/") if isinstance(reference, str) else ("", "", "")
    found = shared.get(place.removeprefix("#/"), {}).get(name) if place.startswith("#/") else None
    return found if isinstance(found, Mapping) else schema


def _raw(schema: Mapping[str, Any], closing: str) -> list[Piece] | None:
    """A string as it is, up to its closing tag; None for what is not declared as a string, or by a pattern."""
    options = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if options and all(isinstance(option, str) for option in options):
        return [Piece("(" + " | ".join(map(literal, options)) + ")", kind="rule"), Piece(closing)]
    if schema.get("type") != "string":
        return None
    if schema.keys() <= _PLAIN_KEYS:
        return [Piece(closing, kind="until")]
    if schema.keys() <= _LENGTH_KEYS:
        length = f"{int(schema.get('minLength', 0))},{schema.get('maxLength', '')}"
        return [Piece(f"/[^<]{{{length}}}/", kind="rule"), Piece(closing)]
    return None


_DEEPSEEK_SECTION = Tags("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = Tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DSML_CALL = Tags('<｜DSML｜invoke name="', "</｜DSML｜invoke>")

HERMES = ToolFormat(
    "hermes", Tags("<tool_call>", "</tool_call>"), _read_json, _json_head, _force_json, ("<tool_call>",),
    separator="\n", foreign=("<invoke", "<tool_calls>"),
)  # fmt: skip
TOOL_FORMATS = (
    ToolFormat(
        "deepseek_v32", _DSML_CALL, _read_dsml, _headed(_DSML_NAME), _force_dsml, ("｜DSML｜", "function_calls>"),
        Tags("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), ("\n", "\n"), "\n", _DSML_PAIRS,
    ),
    ToolFormat(
        "deepseek_v4", _DSML_CALL, _read_dsml, _headed(_DSML_NAME), _force_dsml, ("｜DSML｜", "tool_calls>"),
        Tags("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"), ("\n", "\n"), "\n", _DSML_PAIRS,
    ),
    ToolFormat(
        "deepseek_v3", _DEEPSEEK_CALL, _read_fenced, _headed(_FENCED_HEAD), _force_fenced,
        ("<｜tool▁sep｜>", "```json"), _DEEPSEEK_SECTION, separator="\n",
    ),
    ToolFormat(
        "deepseek_v31", _DEEPSEEK_CALL, _read_separated, _headed(_SEPARATED_HEAD), _force_separated,
        ("<｜tool▁sep｜>",), _DEEPSEEK_SECTION,
    ),
    ToolFormat(
        "kimi_k2", Tags("<|tool_call_begin|>", "<|tool_call_end|>"), _read_kimi, _kimi_head, _force_kimi,
        ("<|tool_calls_section_begin|>",), Tags("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ToolFormat(
        "glm45", Tags("<tool_call>", "</tool_call>"), _read_glm, _headed(_GLM_HEAD), _force_glm,
        ("<tool_call>", "<arg_key>"), separator="\n", pairs=_GLM_PAIRS,
    ),
    ToolFormat(
        "qwen3_coder", Tags("<tool_call>", "</tool_call>"), _read_coder, _headed(_CODER_NAME), _force_coder,
        ("<tool_call>", "<function="), separator="\n", pairs=_CODER_PAIRS,
    ),
    HERMES,
)  # fmt: skip
"""In the order in which a template is asked for their marks."""

_ALIASES = {
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "qwen": "hermes",
    "qwen25": "hermes", "qwen3": "hermes", "generic": "hermes", "glm": "glm45", "glm47": "glm45",
}  # fmt: skip
_BY_NAME = {form.name: form for form in TOOL_FORMATS}
TOOL_FORMAT_NAMES = _BY_NAME | {alias: _BY_NAME[name] for alias, name in _ALIASES.items()}
"""Names of `--tool-call-parser`, those of vLLM and SGLang among them."""

THINK = Tags("<think>", "</think>")
THINKING_NAMES = dict.fromkeys(
    ("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "qwen3",
     "glm45", "kimi_k2", "generic"), THINK,
)  # fmt: skip
"""Names of `--reasoning-parser`; so far all families use the same tags."""


@dataclass(frozen=True, slots=True)
class Formats:
    """How one model marks its thinking and its calls; None where that is not read. `reasons`: why, for the log."""

    thinking: Tags | None
    calls: ToolFormat | None
    reasons: tuple[str, str]

    def lines(self) -> tuple[str, str]:
        """What was chosen, for the log."""
        thinking = "none" if self.thinking is None else f"{self.thinking.open} {self.thinking.close}"
        calls = "none" if self.calls is None else self.calls.name
        return f"reasoning tags: {thinking} ({self.reasons[0]})", f"tool calls: {calls} ({self.reasons[1]})"


def choose_formats(template: str | None, names: ParserNames) -> Formats:
    """By name, by the chat template ("auto") or not at all ("none"). Raises CoterieError for an unknown name."""
    source = template or ""
    thinking, calls = thinking_of(source), tool_format_of(source) or HERMES
    reasons = ["by the chat template", "by the chat template" if tool_format_of(source) else "the general one"]
    if names.reasoning != "auto":
        thinking, reasons[0] = _named(THINKING_NAMES, names.reasoning, "--reasoning-parser"), "as asked"
    chosen: ToolFormat | None = calls
    if names.tool_calls != "auto":
        chosen, reasons[1] = _named(TOOL_FORMAT_NAMES, names.tool_calls, "--tool-call-parser"), "as asked"
    return Formats(thinking, chosen, (reasons[0], reasons[1]))


def _named(table: Mapping[str, T], name: str, flag: str) -> T | None:
    if name == "none":
        return None
    if name not in table:
        raise CoterieError(f"{flag} {name} is unknown; known are auto, none, {', '.join(sorted(table))}")
    return table[name]


def thinking_of(template: str) -> Tags | None:
    """The tags of thinking that a chat template knows."""
    return THINK if THINK.open in template or THINK.close in template else None


def tool_format_of(template: str) -> ToolFormat | None:
    """The format of calls that a chat template writes, None if it is none of these."""
    return next((form for form in TOOL_FORMATS if form.is_written_by(template)), None)
