"""What a request says of tools: which there are, whether one must be called, and how the model is told.

Not here: the formats of families (`server.formats`), the grammar that forces a call (`server.forcing`), reading calls
(`server.parsers`), calls of earlier turns (`server.call_style`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from coterie.server.errors import ApiError, bad_request, not_supported
from coterie.server.formats import FUNCTION_NAME, Call, Tool, ToolFormat, Tools
from coterie.server.protocol import ChatRequest

FunctionName = Annotated[str, Meta(pattern=f"^{FUNCTION_NAME.pattern}$")]


class _Function(Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Declaration(Struct, frozen=True):
    function: _Function
    type: Literal["function"] = "function"


class _Named(Struct, frozen=True):
    name: FunctionName


class _Choice(Struct, frozen=True):
    function: _Named
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`declared`: as the client wrote them, for the template. `forced`: one of these must be called; empty if the model
    may choose. `many`: whether there may be several calls; a tool that is named is called once."""

    tools: Tools
    declared: list[dict[str, Any]]
    forced: tuple[Tool, ...]
    many: bool

    @property
    def is_strict(self) -> bool:
        """Whether a call must follow its tool's schema wherever it begins."""
        return not self.forced and any(tool.strict for tool in self.tools.values())


def tool_use(request: ChatRequest) -> ToolUse | None:
    """What a request's tools come to, None without any. Raises ApiError naming the field at fault."""
    declared, choice = request.tools or [], request.tool_choice
    if choice == "none" or (not declared and choice in (None, "auto")):
        return None
    if not declared:
        raise bad_request("tool_choice: there are no tools to call; send tools", param="tool_choice")
    tools: dict[str, Tool] = {}
    for i, one in enumerate(declared):
        function = _read(one, _Declaration, f"tools[{i}]").function
        if function.name in tools:
            raise bad_request(f"tools[{i}].function.name: {function.name!r} is declared twice", param=f"tools[{i}]")
        tools[function.name] = Tool(
            function.name, {"type": "object", **(function.parameters or {})}, strict=function.strict is True
        )
    many = request.parallel_tool_calls is not False and not isinstance(choice, dict)
    return ToolUse(tools, declared, _forced(choice, tools), many)


def _forced(choice: str | dict[str, Any] | None, tools: Tools) -> tuple[Tool, ...]:
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tuple(tools.values())
    if isinstance(choice, str):
        message = f"tool_choice: {choice[:50]!r} is unknown; use auto, none, required or a function"
        raise bad_request(message, param="tool_choice")
    if choice.get("type", "function") != "function":
        raise not_supported("tool_choice", f"type {str(choice.get('type'))[:50]!r} is not supported; name a function")
    name = _read(choice, _Choice, "tool_choice").function.name
    if name not in tools:
        raise bad_request(f"tool_choice.function.name: {name!r} is not among the tools", param="tool_choice")
    return (tools[name],)


def _read(value: dict[str, Any], kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, where) from error


def _invalid(error: msgspec.ValidationError, where: str) -> ApiError:
    message, _, path = str(error).partition(" - at `$")
    param = where + path.rstrip("`")
    return bad_request(f"{param}: {message[0].lower()}{message[1:]}", param=param)


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Messages whose system message, made if there is none, tells of the tools."""
    text = described(tools, form)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def described(tools: Sequence[dict[str, Any]], form: ToolFormat) -> str:
    """A system message's part that tells of the tools, for a model whose template does not."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = written(form, [Call("NAME", '{"ARGUMENT": VALUE}')])
    return f"You may call these functions, described by JSON schemas:\n{listed}\nTo call one, write:\n{example}"


def written(form: ToolFormat, calls: Sequence[Call]) -> str:
    """Calls as the model would write them. For formats whose arguments are one JSON text, their last piece but text; a
    piece before it is the call's number."""
    texts = []
    for number, call in enumerate(calls):
        pieces = form.force(Tool(call.name, {}))
        last = max((i for i, piece in enumerate(pieces) if piece.kind != "text"), default=-1)
        inner = "".join(
            piece.text if piece.kind == "text" else call.arguments if i == last else str(number)
            for i, piece in enumerate(pieces)
        )
        texts.append(form.call.open + inner + form.call.close)
    text = form.separator.join(texts)
    if form.section is None:
        return text
    before, after = form.section_padding
    return form.section.open + before + text + after + form.section.close
