"""`coterie serve`: flags to configs, progress, and the Ready text. The server itself is `server.run`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from coterie.cli.common import (
    AT_LEAST_ONE,
    DEFAULTS,
    Decorator,
    FiniteRange,
    LoadProgress,
    engine_config,
    engine_options,
    error_console,
    model_folder,
)
from coterie.cli.parallel import parallel_config, parallel_options
from coterie.cli.service import SERVICE_OPTIONS, checked_key, read_keys, service_config
from coterie.engine.config import NO_CLASSES, ServiceConfig
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import RunSpec
from coterie.engine.remote import World, supervise
from coterie.model.shipped import shipped_model_path
from coterie.observe.requests import RequestObserver
from coterie.server.config import (
    Access,
    AdminConfig,
    ApiKey,
    ConnectionLimits,
    ParserNames,
    ServerConfig,
    TlsConfig,
)
from coterie.server.run import serve as run_server

SERVER = ServerConfig()
CONNECTIONS = SERVER.connections
PROMPT = "To be, or not"
PROMPT_IDS = [1, 2, 3]
POSITIVE = FiniteRange(min=0.0, min_open=True)
NOT_NEGATIVE = FiniteRange(min=0.0)

logger = logging.getLogger("coterie.cli")

SERVER_OPTIONS: tuple[Decorator, ...] = (
    click.option("--host", default=SERVER.host, show_default=True, help="Address to listen on; 0.0.0.0 for all."),
    click.option("--port", type=click.IntRange(0, 65535), default=SERVER.port, show_default=True,
                 help="0 takes a free one."),
    click.option("--api-key", help="Key that clients must send."),
    click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False),
                 help="File of keys, one a line, a service class behind each if they differ."),
    click.option("--admin-key-file", type=click.Path(exists=True, dir_okay=False),
                 help="File of the key that opens POST /v1/admin/reload, which exchanges the model."),
    click.option("--admin-model-dir", type=click.Path(exists=True, file_okay=False), multiple=True,
                 help="Folder within which a model may be loaded so; repeatable."),
    click.option("--ssl-certfile", type=click.Path(), help="PEM file of the server's certificate: serve HTTPS."),
    click.option("--ssl-keyfile", type=click.Path(), help="PEM file of its private key, if it stands in another file."),
    click.option("--ssl-ca-certs", type=click.Path(),
                 help="PEM file of authorities: clients must show a certificate that one of them signed."),
    click.option("--served-model-name", "--alias", "served_model_name",
                 help="Name that clients use. [default: the folder's]"),
    click.option("--chat-template", type=click.Path(exists=True, dir_okay=False),
                 help="Jinja file that replaces the model's template."),
    click.option("--reasoning-parser", default=SERVER.parsers.reasoning, show_default=True, metavar="NAME",
                 help="How thinking is marked: a family's name, auto (by the chat template) or none."),
    click.option("--tool-call-parser", default=SERVER.parsers.tool_calls, show_default=True, metavar="NAME",
                 help="How tool calls are written: a family's name, auto (by the chat template) or none."),
    click.option("--enable-auto-tool-choice", is_flag=True, expose_value=False,
                 help="Accepted and not needed: models may always choose tools."),
    click.option("--strict-api", is_flag=True, help="Refuse request fields that are not known."),
    click.option("--metrics-compat", type=click.Choice(["none", "vllm"]), default=SERVER.metrics_compat,
                 show_default=True, help="Repeat the core metrics under another engine's names."),
    click.option("--max-body-bytes", type=AT_LEAST_ONE, default=SERVER.max_body_bytes, show_default=True,
                 help="Longest body; beyond it 413."),
    click.option("--max-body-seconds", type=POSITIVE, default=SERVER.max_body_seconds, show_default=True,
                 help="Time a body may take to arrive; beyond it 408."),
    click.option("--max-connections", type=AT_LEAST_ONE, default=CONNECTIONS.max_connections, show_default=True,
                 help="Connections at once; beyond it 503, or the one that has rested longest is closed."),
    click.option("--max-header-bytes", type=AT_LEAST_ONE, default=CONNECTIONS.max_header_bytes, show_default=True,
                 help="Longest request line and headers; beyond it 431."),
    click.option("--max-header-seconds", type=POSITIVE, default=CONNECTIONS.max_header_seconds, show_default=True,
                 help="Time they may take to arrive; beyond it 408."),
    click.option("--keep-alive-seconds", type=POSITIVE, default=CONNECTIONS.keep_alive_seconds, show_default=True,
                 help="How long a connection is kept without a request."),
    click.option("--max-unread-seconds", type=POSITIVE, default=CONNECTIONS.max_unread_seconds, show_default=True,
                 help="How long a client may leave unread what it was sent."),
    click.option("--max-json-depth", type=AT_LEAST_ONE, default=SERVER.max_json_depth, show_default=True,
                 help="Deepest nesting of brackets in a body."),
    click.option("--max-prompts", type=AT_LEAST_ONE, default=SERVER.max_prompts, show_default=True,
                 help="Prompts of one completions request."),
    click.option("--max-choices", type=AT_LEAST_ONE, default=SERVER.max_choices, show_default=True,
                 help="Sequences of one request: prompts times n."),
    click.option("--max-messages", type=AT_LEAST_ONE, default=SERVER.max_messages, show_default=True,
                 help="Messages of one chat."),
    click.option("--template-seconds", type=POSITIVE, default=SERVER.template_seconds, show_default=True,
                 help="Time a chat template may take."),
    click.option("--template-max-chars", type=AT_LEAST_ONE, default=SERVER.template_max_chars, show_default=True,
                 help="Longest text a chat template may write."),
    click.option("--sse-ping-interval", "sse_ping_seconds", type=POSITIVE,
                 default=SERVER.sse_ping_seconds, show_default=True,
                 help="Seconds between comments in a silent stream."),
    click.option("--shutdown-timeout", "shutdown_seconds", type=NOT_NEGATIVE,
                 default=SERVER.shutdown_seconds, show_default=True,
                 help="Seconds in which running requests may finish."),
    click.option("--log-interval", "stats_log_seconds", type=NOT_NEGATIVE,
                 default=SERVER.stats_log_seconds, show_default=True, help="Seconds between lines of throughput."),
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
                 show_default=True),
    click.option("--seed", type=int, default=DEFAULTS.seed, show_default=True, help="Seed of requests without one."),
)  # fmt: skip


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the server's flags to a command."""
    for option in reversed(SERVER_OPTIONS + SERVICE_OPTIONS):
        function = option(function)
    return function


@click.command()
@engine_options
@parallel_options
@server_options
def serve(**values: Any) -> None:
    """Serve MODEL (a folder; none: the shipped model) to OpenAI clients.

    \b
    coterie serve
    coterie serve ./DeepSeek-V2-Lite --port 9000 --max-model-len 8192
    """
    folder, config, service = model_folder(values), engine_config(values), service_config(values)
    server, world = server_config(values, service), World.of(os.environ)
    parallel = parallel_config(values, world)
    if world is not None and server.access.admin is not None:  # the ranks' supervisors end with the first model
        raise click.UsageError("under torchrun the model cannot be exchanged; leave --admin-key-file out")
    log_to_stderr(values["log_level"])
    if world is not None and world.rank > 0:
        supervise(world, folder or shipped_model_path())
        return
    run = RunSpec(service=service, parallel=parallel, world=world)
    launched: list[AsyncEngine] = []

    def launch_model(path: str | None, observer: RequestObserver) -> AsyncEngine:
        with LoadProgress(error_console()) as progress:
            engine = AsyncEngine.launch(path, config, server.served_model_name, run, progress=progress)
        for line in report_lines(engine):
            logger.info(line)
        engine.observer = observer
        launched[:] = [engine]  # one that was exchanged is not kept
        return engine

    def say_ready(url: str) -> None:
        engine = launched[0]
        seconds = time.monotonic() - started
        click.secho(f"Ready  {url}/v1", bold=True, nl=False)
        click.echo(f"   {engine.model_name} · context {engine.max_model_len} · loaded in {seconds:.1f} s\n")
        hints = ready_text(
            f"{url}/v1",
            engine.model_name,
            needs_key=bool(server.access.api_keys),
            takes_text=engine.tokenizer is not None,
        )
        click.echo(hints)

    started = time.monotonic()
    run_server(lambda observer: launch_model(folder, observer), server, say_ready, launch_model)


def report_lines(engine: AsyncEngine) -> list[str]:
    """Say what was loaded and what was chosen for this machine, each with its reason."""
    return [*engine.load_lines, *(f"{choice.what}: {choice.value} ({choice.reason})" for choice in engine.report)]


def log_to_stderr(level: str) -> None:
    """Send log lines to stderr: ours from `level` on, other packages' warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("coterie").setLevel(level.upper())


def server_config(values: Mapping[str, Any], service: ServiceConfig = NO_CLASSES) -> ServerConfig:
    """Build the ServerConfig from a command's values; what has no flag keeps its default."""
    names = {field.name for field in fields(ServerConfig)}
    known = {name: value for name, value in values.items() if name in names}
    parsers = ParserNames(reasoning=values["reasoning_parser"], tool_calls=values["tool_call_parser"])
    access = Access(api_keys=api_keys(values, service), admin=admin_config(values), tls=tls_config(values))
    connections = ConnectionLimits(**{field.name: values[field.name] for field in fields(ConnectionLimits)})
    return ServerConfig(**known, parsers=parsers, access=access, connections=connections)


def api_keys(values: Mapping[str, Any], service: ServiceConfig) -> tuple[ApiKey, ...]:
    """The keys of `--api-key` or `--api-key-file`; none if neither was given."""
    key, path = values["api_key"], values["api_key_file"]
    if key is not None and path is not None:
        raise click.UsageError("give --api-key or --api-key-file, not both")
    if path is not None:
        return read_keys(Path(path), service)
    return () if key is None else (ApiKey(checked_key(key, "--api-key")),)


def admin_config(values: Mapping[str, Any]) -> AdminConfig | None:
    """Build the AdminConfig from a command's values; None without admin routes."""
    path, folders = values["admin_key_file"], values["admin_model_dir"]
    if (path is None) != (not folders):
        raise click.UsageError("--admin-key-file and --admin-model-dir go together")
    if path is None:
        return None
    key = checked_key(Path(path).read_text(encoding="utf-8", errors="replace").strip(), path)
    return AdminConfig(key=key, folders=tuple(folders))


def tls_config(values: Mapping[str, Any]) -> TlsConfig | None:
    """Build the TlsConfig from a command's values; None for plain HTTP."""
    certfile, keyfile, ca_certs = values["ssl_certfile"], values["ssl_keyfile"], values["ssl_ca_certs"]
    if certfile is None:
        if keyfile is not None or ca_certs is not None:
            raise click.UsageError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    return TlsConfig(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)


def ready_text(base_url: str, model: str, *, needs_key: bool, takes_text: bool = True) -> str:
    """Say where the server is and give lines to paste: one for curl, three for Python.

    Without a tokenizer prompts are ids and answers have no text, so the lines ask for the names of the tokens.
    """
    header = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    asked: dict[str, Any] = {"prompt": PROMPT if takes_text else PROMPT_IDS, "max_tokens": 40}
    if not takes_text:
        asked["logprobs"] = 0
    shown = "text" if takes_text else "logprobs.tokens"
    arguments = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    body = json.dumps({"model": model} | asked)
    quoted = body.replace("'", "'\\''")
    key = "YOUR_KEY" if needs_key else "none"
    return f"""\
curl {base_url}/completions{header} -H 'Content-Type: application/json' -d '{quoted}'

from openai import OpenAI
client = OpenAI(base_url={base_url!r}, api_key={key!r})
print(client.completions.create(model={model!r}, {arguments}).choices[0].{shown})
"""
