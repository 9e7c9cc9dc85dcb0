"""Chat templates: messages to prompt text by sandboxed jinja2, in a worker thread, with caps on time and length.

A template is data from a model folder: it may not reach Python objects, run on without end or grow without bound. Not
here: tokenising, and templates from a request (never accepted). Without a template, `PLAIN` lays the messages out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from types import CodeType, FrameType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from coterie.server.call_style import CallStyle, laid_out, probe
from coterie.server.errors import bad_request
from coterie.server.formats import HERMES, ToolFormat
from coterie.server.tools import with_tools
from coterie.spec.errors import CoterieError

PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Used for a model without a template: `Role: text` paragraphs. Encoded like a raw prompt, as it holds no BOS."""

_FILE = "<chat template>"
_MAX_REPEAT = 1_000_000
_TEMPLATE_FAULTS = (
    TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
)  # fmt: skip


class _TooSlow(Exception):
    """Raised inside a template whose time is up."""


class _Refused(TemplateError):
    """A template called raise_exception: it does not accept these messages."""


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with repetition bounded: one `*` must not fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for many, times in ((left, right), (right, left)):
            if operator == "*" and hasattr(many, "__len__") and len(many) * abs(int(times)) > _MAX_REPEAT:
                raise SecurityError(f"repetition to more than {_MAX_REPEAT} items")
        if operator == "**" and (abs(left) > _MAX_REPEAT or abs(right) > 64):
            raise SecurityError("a power this large")
        return super().call_binop(context, operator, left, right)


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Caps on one rendering."""

    max_seconds: float
    max_chars: int


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a template is given. `arguments` are chat_template_kwargs; `tools` as the client declared them."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    arguments: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None


class ChatTemplate:
    """A compiled template of one model; `render` may be awaited by many at once.

    form: how the model writes calls. A template that does not read `tools`, or writes another format, gets them
    described in the system message.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str | None],
        limits: TemplateLimits,
        form: ToolFormat = HERMES,
    ) -> None:
        self.is_fallback = source is None
        self._form = form
        self._style: CallStyle | None = None
        self._tokens = {name: text or "" for name, text in special_tokens.items()}
        self._limits = limits
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="chat-template")
        environment = _environment()
        code = _compile(environment, source or PLAIN)
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        names = meta.find_undeclared_variables(environment.parse(source or PLAIN))
        self.takes_tools = form.is_written_by(source or PLAIN) and "tools" in names

    async def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text, or a 400 with the template's reason."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.render_now, prompt)

    def render_now(self, prompt: ChatPrompt) -> str:
        """`render` in the calling thread."""
        messages, tools = prompt.messages, prompt.tools
        if any(message.get("tool_calls") for message in messages):
            if self._style is None:
                self._style = probe(lambda made_up: self._rendered(replace(prompt, messages=made_up)))
            messages = laid_out(messages, self._style, self._form)
        if tools and not self.takes_tools:
            messages, tools = with_tools(messages, tools, self._form), None
        return self._rendered(replace(prompt, messages=messages, tools=tools))

    def _rendered(self, prompt: ChatPrompt) -> str:
        values = {
            **self._tokens,
            "tools": None,
            "documents": None,
            **prompt.arguments,
            **({"tools": prompt.tools} if prompt.tools else {}),
            "messages": prompt.messages,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        deadline = time.monotonic() + self._limits.max_seconds
        try:
            return _with_deadline(deadline, lambda: _join(self._template.generate(values), self._limits.max_chars))
        except _Refused as error:
            raise bad_request(f"messages: the chat template refuses them: {error}", param="messages") from error
        except _TooSlow as error:
            message = f"messages: the chat template took longer than {self._limits.max_seconds:g} s"
            raise bad_request(message, param="messages") from error
        except _TEMPLATE_FAULTS as error:
            raise bad_request(f"messages: the chat template failed on them: {error}", param="messages") from error

    def close(self) -> None:
        """Let go of the worker threads."""
        self._threads.shutdown(wait=False)


def check_template(source: str) -> None:
    """Raise CoterieError unless the source is a template that can be compiled."""
    _compile(_environment(), source)


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> CodeType:
    try:
        return environment.compile(source, name=_FILE, filename=_FILE)
    except TemplateError as error:
        raise CoterieError(f"the chat template is not valid jinja2: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it: keys in their order, no HTML escapes. Templates pass flags by name or position."""
    if indent is not None and not 0 <= indent <= 32:
        raise jinja2.TemplateRuntimeError("tojson: indent must be between 0 and 32")
    pair = None if separators is None else (str(separators[0]), str(separators[1]))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """What filters like `map` give."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _join(pieces: Iterable[str], max_chars: int) -> str:
    parts = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise bad_request(f"messages: the rendered prompt is longer than {max_chars} characters", param="messages")
        parts.append(piece)
    return "".join(parts)


def _with_deadline(deadline: float, work: Callable[[], str]) -> str:
    """Run `work`; each line of template code that starts after the deadline raises.

    A thread cannot be stopped from outside, and a loop that prints nothing never comes back to its caller. So the
    interpreter's own line events look at the clock, in frames of the template only.
    """

    def on_line(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TooSlow
        return on_line

    def on_call(frame: FrameType, event: str, value: Any) -> Any:
        return on_line if frame.f_code.co_filename == _FILE else None

    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        return work()
    finally:
        sys.settrace(previous)
