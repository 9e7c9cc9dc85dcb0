"""The door: API key before anything else, then the body with a cap on bytes, seconds and nesting while it is read.

Not here: what the body means. A request that fails here never reaches the decoder or the engine.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coterie.engine.messages import ServiceClass
from coterie.server.config import ApiKey
from coterie.server.errors import ApiError, ClientGone, Fault, bad_request, error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Answered without a key, for load balancers and orchestrators."""

ADMIN_PREFIX = "/v1/admin/"

_CLASS = "coterie.service_class"
"""Where in the scope the class of the key stands."""

BODIES = 32
"""Bodies of the largest size that may lie half received at once, or smaller ones in their place."""
SMALL = 64 * 1024
"""Up to so many bytes a body is taken all the same: as many as there are connections are no burden."""

_KEPT = b'[]{}"'
_DROPPED = bytes(set(range(256)) - set(_KEPT))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


class KeyCheck:
    """ASGI layer that answers 401 before the body is read, unless the bearer token is one of the keys.

    Admin paths take the admin key and no other, the other paths any of `keys`, or anything if there are none.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], admin_key: str | None = None) -> None:
        self._app = app
        self._keys = [(_digest(key.key), key.service_class) for key in keys]
        self._admin = [] if admin_key is None else [(_digest(admin_key), None)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        keys = (self._admin or self._keys) if scope["path"].startswith(ADMIN_PREFIX) else self._keys
        if not keys:
            await self._app(scope, receive, send)
            return
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Both sides are hashed first, so that neither content nor length of a key shows in the time taken.
        digest = _digest(token.strip())
        found = [name for key, name in keys if hmac.compare_digest(digest, key)]
        if found and scheme.lower() == "bearer":
            await self._app({**scope, _CLASS: found[0]}, receive, send)
            return
        message = "a valid API key is required: send the header 'Authorization: Bearer KEY'"
        fault = Fault(401, message, code="invalid_api_key", close=_has_body(scope))
        await error_response(ApiError(fault))(scope, receive, send)


def key_class(scope: Scope) -> ServiceClass | None:
    """The class that the key of a request is bound to, if it is to any."""
    found: ServiceClass | None = scope.get(_CLASS)
    return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Caps on one request's body."""

    max_bytes: int
    max_seconds: float
    max_depth: int


class BodyReader:
    """Reads bodies, each within its caps and all together within one more: what clients send slowly lies in memory."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held = 0  # bytes of bodies that have not arrived in full

    async def read(self, request: Request) -> bytes:
        """One whole body, or raise: 413 too long, 408 too slow, 415 compressed or a form, 400 nested too deep, 503 too
        many at once."""
        limits = self._limits
        _check_headers(request, limits)
        try:
            async with asyncio.timeout(limits.max_seconds):
                body = await self._collect(request)
        except TimeoutError:
            message = f"the body did not arrive within {limits.max_seconds:g} s (the server's --max-body-seconds)"
            raise ApiError(Fault(408, message, code="request_timeout", retry=False, close=True)) from None
        body = body.removeprefix(codecs.BOM_UTF8)
        depth = json_depth(body)
        if depth > limits.max_depth:
            message = f"the body nests {depth} brackets deep; at most {limits.max_depth} are accepted"
            raise bad_request(f"{message} (--max-json-depth)", code="nesting_too_deep")
        return body

    async def _collect(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                self._held += len(chunk)
                if size > self._limits.max_bytes:
                    raise _too_large(self._limits)
                if self._held > BODIES * self._limits.max_bytes and size > SMALL:
                    raise _too_many()
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
        finally:
            self._held -= size


def _check_headers(request: Request, limits: BodyLimits) -> None:
    """Refuse a body by what its head says."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and kind != "application/json":
        # Browsers let any page send forms and plain text to this machine without asking; JSON they ask for first.
        message = f"content-type {kind!r}: a browser must send application/json"
        raise ApiError(Fault(415, message, code="unsupported_media_type", close=True))
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"content-encoding {encoding!r} is not supported; send the body uncompressed"
        raise ApiError(Fault(415, message, code="unsupported_encoding", close=True))
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise _too_large(limits)


def _too_many() -> ApiError:
    message = "too many large bodies are being received at once; send this one again"
    return ApiError(Fault(503, message, kind="server_error", code="too_many_bodies", retry_after=1, close=True))


def _too_large(limits: BodyLimits) -> ApiError:
    message = f"the body is larger than {limits.max_bytes} bytes (the server's --max-body-bytes)"
    return ApiError(Fault(413, message, code="body_too_large", close=True))


def json_depth(body: bytes) -> int:
    """Count how deep brackets nest outside of strings, in time linear in the body and without recursion.

    Exact for valid JSON; for anything else it is some number, and the decoder refuses the text afterwards.
    """
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    marks = np.frombuffer(text.translate(None, _DROPPED), np.uint8)
    if not len(marks):
        return 0
    inside_string = np.cumsum(marks == ord('"'), dtype=np.int32) & 1
    steps = np.where(inside_string, 0, _STEP[marks])
    return max(0, int(np.cumsum(steps, dtype=np.int32).max()))
