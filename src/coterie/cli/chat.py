"""`coterie chat`: talk with a model in the terminal, in this process or with a running server.

Each line is a turn; the whole conversation is sent each time (the prefix cache makes that cheap). Ctrl-C stops the
answer; at the prompt it leaves. Works with piped stdin, one line a turn. Not a full-screen program.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from coterie.cli.common import Timing, engine_options, error_console, sampling_options, sampling_params
from coterie.cli.parallel import PARALLEL_NAMES, parallel_options
from coterie.cli.remote import RemoteServer, Show
from coterie.cli.session import LocalEngine
from coterie.engine.config import OPTION_NAMES
from coterie.server.parts import Part
from coterie.spec.errors import CoterieError

Message = dict[str, str]
Reply = Callable[[list[Message], Show], Timing]

HELP = "/reset starts over, /exit leaves, Ctrl-C stops an answer"


@click.command()
@engine_options
@parallel_options
@click.option("--url", help="Talk with a running server, as in http://127.0.0.1:8000.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key for --url. [env: OPENAI_API_KEY]")
@click.option("--system", help="System message.")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), help="Longest answer. [default: the room left]")
@sampling_options
def chat(**values: Any) -> None:
    """Talk with MODEL (a folder or a server's URL; none: the shipped model).

    /reset starts over, /exit leaves. Ctrl-C stops an answer; at the prompt it leaves.
    """
    given = values["model"]
    url = given if given is not None and given.startswith(("http://", "https://")) else values["url"]
    if url is not None:
        if values["model_option"] is not None or given not in (None, url):
            raise click.UsageError("give a model folder or a server's URL, not both")
        refuse_engine_flags(click.get_current_context())
        server = RemoteServer(url, values["api_key"])
        converse(remote_reply(server, values), server.model, values["system"])
        return
    with LocalEngine(values, needs_text=True) as local:
        converse(local_reply(local, values), local.engine.model_name, values["system"])


def refuse_engine_flags(context: click.Context) -> None:
    """A server has chosen how its model runs; a flag that could change nothing is refused, not passed over."""
    names = OPTION_NAMES | PARALLEL_NAMES
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)} has no effect on a server; set it where the server is started")


def remote_reply(server: RemoteServer, values: Mapping[str, Any]) -> Reply:
    """Answer through a server."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    options = {name: values[name] for name in names}
    options["seed"] = values["sampling_seed"]
    options["stop"] = list(values["stop"]) or None

    def reply(messages: list[Message], show: Show) -> Timing:
        return server.reply(messages, options, show)

    return reply


def local_reply(local: LocalEngine, values: Mapping[str, Any]) -> Reply:
    """Answer with the engine in this process."""
    params = sampling_params(values)

    def reply(messages: list[Message], show: Show) -> Timing:
        prompt_ids, parser = local.encode_chat(messages)

        def tell(parts: Iterable[Part]) -> None:
            for part in parts:
                (show.thought if part.kind == "reasoning" else show.text)(part.text)

        try:
            return local.answer(prompt_ids, params, lambda text: tell(parser.push(text))).timing
        finally:
            tell(parser.finish())

    return reply


def converse(reply: Reply, model: str, system: str | None) -> None:
    """Read turns until the end of input or /exit; one turn's error is said and the conversation goes on."""
    aside = error_console()
    interactive = sys.stdin is not None and sys.stdin.isatty()
    aside.print(f"[bold]{model}[/]  [dim]{HELP}[/]")
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    failures = 0
    while (line := read_turn(interactive=interactive)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            aside.print("[dim]a new conversation[/]")
        elif line.startswith("/") and line[1:].isalpha():
            aside.print(f"[dim]there is no {line}; {HELP}[/]")
        elif line:
            failures += not take_turn(reply, messages, line, aside)
    if failures and not interactive:
        raise CoterieError(f"{failures} of the turns failed; their reasons are above")


def take_turn(reply: Reply, messages: list[Message], line: str, aside: Console) -> bool:
    """Answer one line and add both to `messages`; False when the engine refused it (then nothing is added)."""
    pieces: list[str] = []
    thinking = False

    def show(text: str) -> None:
        nonlocal thinking
        if thinking:
            aside.print("\n")
        thinking = False
        pieces.append(text)
        click.echo(text, nl=False)

    def show_thought(text: str) -> None:
        """Beside the answer: it is no part of it, and goes to no file that the answer is written to."""
        nonlocal thinking
        thinking = True
        aside.print(Text(text, style="dim"), end="", soft_wrap=True)

    messages.append({"role": "user", "content": line})
    try:
        said = reply(messages, Show(show, show_thought)).line()
    except KeyboardInterrupt:
        said = "stopped"
    except CoterieError as error:
        messages.pop()
        click.echo(f"error: {' '.join(str(error).split())}; /reset starts over", err=True)
        return False
    click.echo()
    aside.print(f"[dim]{said}[/]")
    messages.append({"role": "assistant", "content": "".join(pieces)})
    return True


def read_turn(*, interactive: bool) -> str | None:
    """Read one line; None at the end of input."""
    if not interactive:
        line = "" if sys.stdin is None else sys.stdin.readline()
        return line.strip() if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None
