"""/openapi.json: FastAPI lists the routes, msgspec gives the schemas of their bodies, so the file is complete.

The bodies are never declared to FastAPI itself, which would read and validate them a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec import Struct

from coterie.server import answers, protocol
from coterie.server.limits import OPEN_PATHS
from coterie.server.responses_protocol import ResponseBody, ResponsesRequest, StreamEvent

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "A field is wrong; the error names it.",
    401: "The API key is missing or wrong.",
    403: "Not within the folders that may be loaded.",
    404: "No such model.",
    408: "The body came too slowly.",
    409: "Another reload has not ended.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; see Retry-After.",
    500: "The server failed on this request.",
    503: "Loading, overloaded or shutting down; see Retry-After.",
}

REQUESTS: tuple[type[Struct], ...] = (
    protocol.ChatRequest,
    protocol.CompletionRequest,
    ResponsesRequest,
    protocol.TokenizeRequest,
    protocol.DetokenizeRequest,
    protocol.ReloadRequest,
)
ANSWERS: tuple[type[Struct], ...] = (
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Completion,
    ResponseBody,
    *get_args(StreamEvent),
    answers.ModelList,
    answers.ModelCard,
    answers.TokenizeAnswer,
    answers.DetokenizeAnswer,
    answers.Status,
    answers.Version,
    answers.Reloaded,
    answers.ErrorBody,
)


def schemas() -> dict[str, Any]:
    """components/schemas: every body of every route."""
    _, found = msgspec.json.schema_components([*REQUESTS, *ANSWERS], ref_template=_REF)
    return found


def operation(
    answer: type[Struct] | None,
    *,
    request: type[Struct] | None = None,
    chunks: Sequence[type[Struct]] = (),
    errors: Sequence[int] = (),
) -> dict[str, Any]:
    """The `openapi_extra` of a route: its bodies, and errors in one shape. `chunks`: the events of its stream;
    `errors`: statuses beside those that every route, and every route with a body, may have."""
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        content = {"application/json": {"schema": _ref(answer)}}
    if chunks:
        content["text/event-stream"] = {"schema": _event(chunks)}
    error = {"application/json": {"schema": _ref(answers.ErrorBody)}}
    usual = _ERRORS.keys() - {403, 409} if request is not None else {401, 503}
    codes = {code: _ERRORS[code] for code in sorted({*usual, *errors})}
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    responses |= {str(code): {"description": text, "content": error} for code, text in codes.items()}
    extra: dict[str, Any] = {"responses": responses}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return extra


def _event(chunks: Sequence[type[Struct]]) -> dict[str, Any]:
    """One server-sent event: its data is the JSON of a chunk or an error, or ends a stream that went well."""
    kinds: list[type[Struct]] = [*chunks, answers.ErrorBody]
    bodies = {"anyOf": [_ref(kind) for kind in kinds]}
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": bodies}
    return {
        "type": "object",
        "description": "One event of the stream.",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, chunk]}},
        "required": ["data"],
    }


def complete(document: dict[str, Any], *, needs_key: bool, has_admin: bool) -> dict[str, Any]:
    """Add the schemas, and the keys that are needed, to what FastAPI made."""
    components = document.setdefault("components", {})
    components["schemas"] = schemas()
    bearer = {"type": "http", "scheme": "bearer"}
    if needs_key or has_admin:
        needed = {"key": needs_key, "admin": has_admin}
        components["securitySchemes"] = {name: bearer for name, needs in needed.items() if needs}
    if needs_key:
        document["security"] = [{"key": []}]
        for path in OPEN_PATHS:
            document["paths"][path]["get"]["security"] = []
    return document


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
