"""ServerConfig: what a user may choose about the HTTP server, frozen. Engine choices live in `engine.config`.

Not here: bounds that are part of the protocol (lengths of lists, ranges of numbers); they stand in `server.protocol`
and are published in /openapi.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from coterie.engine.messages import ServiceClass

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may send, and the service class that it is bound to; None: the client may choose."""

    key: str
    service_class: ServiceClass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserNames:
    """How answers are read: a family's name, "auto" (by the chat template) or "none" (`server.formats`)."""

    reasoning: str = "auto"
    tool_calls: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files. keyfile None: the certificate's file holds the key too. ca_certs: clients must show a certificate that
    one of these signed."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """What opens the admin routes: a key of their own, and the folders within which a model may be loaded."""

    key: str
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may do what. api_keys: clients must send one of them; none: anybody is served. admin None: there are no admin
    routes. tls: serve HTTPS, not HTTP."""

    api_keys: tuple[ApiKey, ...] = ()
    admin: AdminConfig | None = None
    tls: TlsConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on connections. max_header_seconds: for a request's head to arrive, from its first byte or the
    connection's beginning. keep_alive_seconds: without a request, longer than the pools of usual clients and proxies
    keep theirs. max_unread_seconds: for a client to read on, once buffers are full of what it was sent."""

    max_connections: int = 1024
    max_header_bytes: int = 64 * 1024
    max_header_seconds: float = 20.0
    keep_alive_seconds: float = 75.0
    max_unread_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every field has a flag (`coterie serve --help`). Limits are in bytes, seconds or counts as the name says; port 0
    takes a free one.

    chat_template: a file that replaces the model's own template. parsers: how its answers are read. metrics_compat
    "vllm" repeats the core metrics under `vllm:` names. shutdown_seconds: how long running requests may finish after
    SIGTERM before they are aborted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    access: Access = field(default_factory=Access)
    served_model_name: str | None = None
    chat_template: str | None = None
    parsers: ParserNames = field(default_factory=ParserNames)
    strict_api: bool = False
    metrics_compat: Literal["none", "vllm"] = "none"
    max_body_bytes: int = 8 * 1024 * 1024
    max_body_seconds: float = 30.0
    max_json_depth: int = 100
    max_prompts: int = 256
    max_choices: int = 128
    max_messages: int = 4096
    template_seconds: float = 5.0
    template_max_chars: int = 8 * 1024 * 1024
    sse_ping_seconds: float = 15.0
    shutdown_seconds: float = 30.0
    stats_log_seconds: float = 10.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
