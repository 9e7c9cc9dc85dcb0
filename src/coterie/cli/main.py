"""The `coterie` command: a table of verbs, loaded lazily, and the one place where errors become one line.

`coterie --help` imports click and nothing else of ours, so it answers at once. A verb is `module:attribute`; its module
is imported when the verb is run. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import ClassVar

import click

from coterie import __version__

VERBS: Mapping[str, tuple[str, str]] = {
    "serve": ("coterie.cli.serve:serve", "Serve a model to OpenAI clients."),
    "chat": ("coterie.cli.chat:chat", "Talk with a model in the terminal."),
    "generate": ("coterie.cli.generate:generate", "Complete one prompt and show ids, text and timings."),
    "bench": ("coterie.cli.bench:bench", "Measure this machine, the engine on it, or a running server."),
    "quantize": ("coterie.cli.quantize:quantize", "Write a model quantised and packed, to start in seconds."),
    "train": ("coterie.cli.train:train", "Train the small demo model from a recipe."),
    "plan": ("coterie.cli.plan:plan", "Say whether a model fits, how fast it will be, and what to deploy."),
    "version": ("coterie.cli.common:version", "Show the versions of Coterie and of what it runs on."),
}

EXTRAS: Mapping[str, str] = {"torch": "torch", "matplotlib": "plot"}

NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click from 8.2 on raises for a group without a command; before, it shows the help itself."""


@dataclass(slots=True)
class Session:
    """What `--debug` changes: tracebacks are shown."""

    debug: bool = False


class VerbGroup(click.Group):
    """A click group that imports a verb's module only to run it."""

    verbs: ClassVar[Mapping[str, tuple[str, str]]] = VERBS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        module, _, attribute = self.verbs[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.verbs:
            ctx.fail(f"there is no command '{args[0]}'; possible are {', '.join(self.verbs)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in self.verbs.items()])


def show_debug(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Turn tracebacks on (callback of every `--debug`)."""
    if value:
        ctx.ensure_object(Session).debug = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=show_debug, help="Show tracebacks of errors."
)


def show_version(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Print the version and leave (callback of `--version`)."""
    if value:
        click.echo(f"coterie {__version__}")
        ctx.exit()


@click.group(cls=VerbGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=show_version, help="Show version.")
@debug_option
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Coterie serves Mixture-of-Experts language models of the DeepSeek family on CPUs.

    Without a model, `serve`, `chat` and `generate` use the small one that is shipped.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def check_folder(*files: Path | None) -> None:
    """Refuse a file that is to be written into no folder, before work is done that would be lost."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise click.ClickException(f"cannot write {file}: there is no folder {file.parent}")


def one_line(message: str) -> str:
    """Join a message's lines into one."""
    return " ".join(message.split())


def explain(error: Exception) -> str:
    """Say an exception in one line, with the next step where we know it."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        root = error.name.partition(".")[0]
        if root in EXTRAS:
            return f"this needs {root}, which is not installed: pip install 'coterie[{EXTRAS[root]}]'"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    errors = importlib.import_module("coterie.spec.errors")
    if isinstance(error, errors.CoterieError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)"


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; every error is one line on stderr."""
    session = Session()
    try:
        code = cli.main(args=arguments, prog_name="coterie", standalone_mode=False, obj=session)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        if isinstance(error, NO_ARGUMENTS):  # `coterie plan`: its help, on lines of its own
            click.echo(error.format_message())
            return 0
        where = error.ctx.command_path if error.ctx is not None else "coterie"
        return fail(f"{error.format_message()} (see '{where} --help')", error.exit_code)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return fail("interrupted", 130)
    except Exception as error:
        if session.debug:
            traceback.print_exc()
        return fail(explain(error), 1)


def fail(message: str, code: int) -> int:
    """Print one error line on stderr and return `code`."""
    click.echo(f"error: {one_line(message)}", err=True)
    return code


def main() -> None:
    """Entry point of the `coterie` command. What the terminal cannot spell is shown as an escape, not as an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())
