"""`coterie generate`: complete one prompt and show text, ids, finish reason; timings on stderr. Not a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from coterie.cli.common import engine_options, sampling_options, sampling_params
from coterie.cli.parallel import parallel_options
from coterie.cli.session import Answer, LocalEngine
from coterie.spec.errors import CoterieError


class TokenIds(click.ParamType):
    """Token ids separated by commas."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in str(value).replace(",", " ").split()]
        except ValueError:
            self.fail(f"'{value}' is not a list of token ids; write whole numbers with commas, as in 1,2,3", param, ctx)


@click.command()
@engine_options
@parallel_options
@click.option("--prompt", "-p", help="Text to continue.")
@click.option("--prompt-file", type=click.Path(exists=True, dir_okay=False, allow_dash=True),
              help="File whose text to continue; - is stdin.")  # fmt: skip
@click.option("--prompt-ids", type=TokenIds(), help="Token ids to continue, as in 1,2,3.")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--min-tokens", type=click.IntRange(min=0), default=0, show_default=True)
@sampling_options
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(**values: Any) -> None:
    """Complete one prompt with MODEL (a folder; none: the shipped model).

    \b
    coterie generate --prompt "To be, or not" --max-tokens 40
    coterie generate ./model --prompt-ids 1,2,3 --temperature 0 --json
    """
    text = prompt_text(values)
    params = sampling_params(values)
    with LocalEngine(values, needs_text=text is not None) as local:
        prompt_ids = values["prompt_ids"] if text is None else local.encode(text)
        live = not values["as_json"] and local.engine.tokenizer is not None
        answer = local.answer(prompt_ids, params, show_piece if live else ignore_piece)
        if values["as_json"]:
            click.echo(json.dumps(report(local, text, prompt_ids, answer), ensure_ascii=False))
            return
    if live:
        click.echo()
    click.echo(f"prompt ids     {','.join(map(str, prompt_ids))}")
    click.echo(f"output ids     {','.join(map(str, answer.output_ids))}")
    click.echo(f"finish reason  {finish(answer)}")
    click.echo(f"timings        {answer.timing.line()}", err=True)


def show_piece(text: str) -> None:
    """Write a piece of the answer at once."""
    click.echo(text, nl=False)


def ignore_piece(text: str) -> None:
    """Show nothing while the answer comes."""


def finish(answer: Answer) -> str:
    """Say why the answer ended."""
    if answer.stop_reason is None:
        return str(answer.finish_reason)
    return f"{answer.finish_reason} ({answer.stop_reason!r})"


def prompt_text(values: Mapping[str, Any]) -> str | None:
    """Return the prompt's text, or None when ids were given; exactly one of the three forms must be there."""
    given = [name for name in ("prompt", "prompt_file", "prompt_ids") if values[name] is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name.replace('_', '-')}" for name in given) or "none"
        raise click.UsageError(f"give exactly one of --prompt, --prompt-file and --prompt-ids (given: {found})")
    if values["prompt_ids"] is not None:
        return None
    if values["prompt_file"] is None:
        return str(values["prompt"])
    name = values["prompt_file"]
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CoterieError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def report(local: LocalEngine, text: str | None, prompt_ids: list[int], answer: Answer) -> dict[str, object]:
    """Assemble the object that --json prints; seconds and tokens per second, null where nothing was measured."""
    timing = answer.timing
    return {
        "model": local.engine.model_name,
        "backend": local.engine.config.backend,
        "prompt": text,
        "prompt_ids": prompt_ids,
        "output_ids": list(answer.output_ids),
        "text": answer.text if local.engine.tokenizer is not None else None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": {
            "prompt_tokens": timing.num_prompt_tokens,
            "completion_tokens": timing.num_output_tokens,
            "cached_tokens": answer.num_cached_tokens,
        },
        "timings": {
            "load_seconds": local.load_seconds,
            "ttft_seconds": timing.first_token,
            "total_seconds": timing.total,
            "prompt_tokens_per_second": timing.prompt_rate,
            "decode_tokens_per_second": timing.decode_rate,
            "stage_seconds": dict(answer.stage_seconds),
        },
    }
