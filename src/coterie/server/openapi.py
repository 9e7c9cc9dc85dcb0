"""/openapi.json: FastAPI lists the routes, msgspec gives the schemas of their bodies, so the file is complete.

The bodies are never declared to FastAPI itself, which would read and validate them a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec import Struct

from coterie.server import answers, protocol
from coterie.server.responses_protocol import ResponseBody, ResponsesRequest, StreamEvent

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "A field is wrong; the error names it.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
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
    answers.ErrorBody,
)


def schemas() -> dict[str, Any]:
    """components/schemas: every body of every route."""
    _, found = msgspec.json.schema_components([*REQUESTS, *ANSWERS], ref_template=_REF)
    return found


def operation(
    answer: type[Struct] | None, *, request: type[Struct] | None = None, chunks: Sequence[type[Struct]] = ()
) -> dict[str, Any]:
    """The `openapi_extra` of a route: its bodies, and errors in one shape. `chunks`: the events of its stream."""
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        content = {"application/json": {"schema": _ref(answer)}}
    if chunks:
        content["text/event-stream"] = {"schema": {"anyOf": [_ref(chunk) for chunk in chunks]}}
    error = {"application/json": {"schema": _ref(answers.ErrorBody)}}
    codes = _ERRORS if request is not None else {code: _ERRORS[code] for code in (401, 503)}
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": content}}
    responses |= {str(code): {"description": text, "content": error} for code, text in codes.items()}
    extra: dict[str, Any] = {"responses": responses}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return extra


def complete(document: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    """Add the schemas, and the key if one is needed, to what FastAPI made."""
    components = document.setdefault("components", {})
    components["schemas"] = schemas()
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
