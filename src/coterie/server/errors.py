"""ApiError: what goes wrong in a request, with its HTTP status and OpenAI's error body; how others become one.

Every error a client sees is made here. Not here: what is valid (protocol, sampling_params) and who logs what (app).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from coterie.engine.errors import EngineBusy, EngineDead, EngineRecovering, InvalidRequest
from coterie.server.answers import ErrorBody, ErrorDetail
from coterie.spec.errors import CoterieError

_INVALID = "invalid_request_error"
_PATH = re.compile(r" - at (?:`key` in |`[^`$]*` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_NOT_A_NUMBER = re.compile(rb'"(\w{1,64})"\s*:\s*(-?(?:NaN|Infinity|nan|inf))')
_FIELD = re.compile(rb'"([A-Za-z_]\w{0,63})"\s*:')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` and `code` are OpenAI's `type` and `code`. `retry` False tells clients not to repeat the request.

    `close` ends the connection after the answer (the request's body was not read to its end).
    """

    status: int
    message: str
    kind: str = _INVALID
    param: str | None = None
    code: str | int | None = None
    retry_after: float | None = None
    retry: bool = True
    close: bool = False

    def detail(self) -> ErrorDetail:
        """What the client is told."""
        return ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)

    def body(self) -> bytes:
        """The JSON of the error."""
        return msgspec.json.encode(ErrorBody(self.detail()))

    def headers(self) -> dict[str, str]:
        """Headers that belong to the fault."""
        found = {}
        if self.retry_after is not None:
            found["Retry-After"] = str(max(1, round(self.retry_after)))
        if not self.retry:
            found["x-should-retry"] = "false"
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        if self.close:
            found["Connection"] = "close"
        return found


class ApiError(CoterieError):
    """A fault on its way to the client."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class ClientGone(Exception):
    """The client hung up: nobody is left to answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(Fault(400, message, param=param, code=code))


def not_supported(param: str, message: str) -> ApiError:
    """A 400 for something this server does not do."""
    return ApiError(Fault(400, f"{param}: {message}", param=param, code="not_supported"))


def unavailable(message: str, retry_after: float, code: str) -> ApiError:
    """A 503 with Retry-After."""
    return ApiError(Fault(503, message, kind="server_error", code=code, retry_after=retry_after))


def internal_error(message: str = "the server failed on this request; its log says why") -> ApiError:
    """A 500. Clients are told not to repeat it: a request that breaks once breaks again."""
    return ApiError(Fault(500, message, kind="server_error", code="internal_error", retry=False))


def as_api_error(error: BaseException) -> ApiError | None:
    """Translate an error of the engine or decoder; None if it is not one that was foreseen."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return bad_request(str(error), param=error.param)
        case EngineBusy():
            return ApiError(
                Fault(429, str(error), kind="rate_limit_error", code="queue_full", retry_after=error.retry_after)
            )
        case EngineRecovering():
            return unavailable(str(error), retry_after=error.retry_after, code="recovering")
        case EngineDead():
            return unavailable(str(error), retry_after=30, code="engine_dead")
        case CoterieError():
            return bad_request(str(error))
    return None


def from_decode_error(error: Exception, body: bytes) -> ApiError:
    """Translate what the JSON decoder said; names the field where the decoder or the text shows it."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        if found := _MISSING.search(text):
            where = _PATH.search(text)
            field = f"{where[1]}.{found[1]}" if where and where[1] else found[1]
            return bad_request(f"{field}: this field is required", param=field)
        if found := _PATH.search(text):
            field = found[1].removesuffix("[...]")
            return bad_request(f"{field}: {text[: found.start()]}", param=field or None)
        return bad_request(text)
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    if not body.strip():
        return bad_request("the body is empty; a JSON object is expected")
    if found_number := _NOT_A_NUMBER.search(body):
        # In a map of token ids, the field is the map.
        names = _FIELD.findall(body[: found_number.start(2)]) or [found_number[1]]
        field, value = names[-1].decode("ascii", "replace"), found_number[2].decode("ascii")
        return bad_request(f"{field}: {value} is not a JSON number; send a finite one", param=field)
    hint = "; it holds half of a surrogate pair" if "truncated" in text and _SURROGATE.search(body) else ""
    return bad_request(f"the body is not valid JSON: {text}{hint}")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer to a fault."""
    fault = error.fault
    return Response(
        fault.body(), fault.status, headers={**(headers or {}), **fault.headers()}, media_type="application/json"
    )
