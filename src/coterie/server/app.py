"""The routes: each reads its body once, asks for the work and answers; every error leaves in OpenAI's shape.

FastAPI routes and lists the routes; bodies are decoded by msgspec (`server.protocol`). Not here: what a request means,
how the model is loaded and how the port is bound (`server.run`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec
from fastapi import FastAPI
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.engine.output import ChoiceDelta
from coterie.server.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    Reloaded,
    Status,
    TokenizeAnswer,
    Version,
)
from coterie.server.chat import ChatCall, prepare_chat
from coterie.server.completions import CompletionCall, prepare_completions
from coterie.server.errors import (
    ApiError,
    ClientGone,
    Fault,
    as_api_error,
    error_response,
    internal_error,
)
from coterie.server.gathering import gathered
from coterie.server.generation import Event, Generation
from coterie.server.limits import KeyCheck, key_class
from coterie.server.metrics import CONTENT_TYPE, CountAnswers
from coterie.server.openapi import complete, operation
from coterie.server.protocol import (
    BodyDecoder,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReloadRequest,
    SamplingFields,
    TokenizeRequest,
)
from coterie.server.reload import Reloader
from coterie.server.responses import ResponsesCall, prepare_responses
from coterie.server.responses_protocol import ResponseBody, ResponsesRequest, StreamEvent
from coterie.server.state import ServedModel, ServerState
from coterie.server.streaming import EventStream
from coterie.server.tiers import service_class
from coterie.server.tokenize import detokenize, tokenize

logger = logging.getLogger("coterie.server")

Call = ChatCall | CompletionCall | ResponsesCall
R = TypeVar("R", bound=Struct)
S = TypeVar("S", bound=SamplingFields)
Endpoint = Callable[[Request], Awaitable[Response]]

PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize", "/health",
    "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/v1/admin/reload",
})  # fmt: skip
"""Paths that are counted by name."""


def path_label(path: str) -> str:
    """What a path is counted as; those that are no route are one label, so that labels stay bounded."""
    if path in PATHS:
        return path
    return "/v1/models/{model_id}" if path.startswith("/v1/models/") else "other"


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application over a state."""
    app = FastAPI(title="Coterie", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    _add_status_routes(app, state)
    _add_model_routes(app, state)
    _add_post_routes(app, state)
    if state.reloader is not None:
        _add_admin_routes(app, state, state.reloader)
    listed = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            has_admin = state.reloader is not None
            app.openapi_schema = complete(listed(), needs_key=bool(state.config.access.api_keys), has_admin=has_admin)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    admin = state.config.access.admin
    if state.config.access.api_keys or admin is not None:
        app.add_middleware(KeyCheck, keys=state.config.access.api_keys, admin_key=None if admin is None else admin.key)
    app.add_middleware(CountAnswers, metrics=state.metrics, label=path_label)
    return app


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    async def health(request: Request) -> Response:
        model = state.loaded
        if model is None:
            return _status(state.phase, 503)
        return _status("ok", 200) if model.engine.is_alive() else _status("the engine does not answer", 503)

    async def ready(request: Request) -> Response:
        model = state.loaded
        if model is None or state.phase != "ready":
            return _status(state.phase, 503)
        if model.engine.is_ready():
            return _status("ready", 200)
        return _status(model.engine.unavailable() or "the engine does not answer", 503)

    async def version(request: Request) -> Response:
        return _json(Version(__version__))

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    for path, endpoint, answer in (
        ("/health", health, Status),
        ("/ping", health, Status),
        ("/ready", ready, Status),
        ("/version", version, Version),
        ("/metrics", metrics, None),
    ):
        name = path[1:]
        app.add_api_route(path, endpoint, name=name, operation_id=name, openapi_extra=operation(answer))
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _add_model_routes(app: FastAPI, state: ServerState) -> None:
    def card() -> ModelCard:
        model = state.model()
        return ModelCard(
            id=model.name,
            created=model.created,
            root=model.engine.model_name,
            max_model_len=model.engine.max_model_len,
        )

    async def models(request: Request) -> Response:
        return _json(ModelList(data=[card()]))

    async def one_model(request: Request) -> Response:
        state.model().check_name(request.path_params["model_id"])
        return _json(card())

    _add(app, "/v1/models", _guarded(models), operation(ModelList))
    extra = operation(ModelCard, errors=(404,))
    extra["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    _add(app, "/v1/models/{model_id:path}", _guarded(one_model), extra, name="model")


def _add_post_routes(app: FastAPI, state: ServerState) -> None:
    chat = _completion_endpoint(state, ChatRequest, prepare_chat)
    completions = _completion_endpoint(state, CompletionRequest, prepare_completions)
    responses = _completion_endpoint(state, ResponsesRequest, prepare_responses)
    chat_extra = operation(ChatCompletion, request=ChatRequest, chunks=(ChatChunk,))
    text_extra = operation(Completion, request=CompletionRequest, chunks=(Completion,))
    responses_extra = operation(ResponseBody, request=ResponsesRequest, chunks=get_args(StreamEvent))
    tokens_extra = operation(TokenizeAnswer, request=TokenizeRequest)
    detokenize_extra = operation(DetokenizeAnswer, request=DetokenizeRequest)
    _add(app, "/v1/chat/completions", chat, chat_extra, name="chat_completions", method="POST")
    _add(app, "/v1/completions", completions, text_extra, name="completions", method="POST")
    _add(app, "/v1/responses", responses, responses_extra, name="responses", method="POST")
    _add(app, "/tokenize", _simple_endpoint(state, TokenizeRequest, tokenize), tokens_extra, method="POST")
    _add(app, "/detokenize", _simple_endpoint(state, DetokenizeRequest, detokenize), detokenize_extra, method="POST")


def _add_admin_routes(app: FastAPI, state: ServerState, reloader: Reloader) -> None:
    decoder = BodyDecoder(ReloadRequest, strict=True)

    async def reload(request: Request) -> Response:
        body = decoder.decode(await state.bodies.read(request))
        return _json(await reloader.reload(body.model, drain=body.drain))

    extra = operation(Reloaded, request=ReloadRequest, errors=(403, 409))
    extra["security"] = [{"admin": []}]
    _add(app, "/v1/admin/reload", _guarded(reload), extra, name="admin_reload", method="POST")


def _add(
    app: FastAPI, path: str, endpoint: Endpoint, extra: dict[str, Any], *, name: str = "", method: str = "GET"
) -> None:
    name = name or path.rsplit("/", 1)[1]
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=name,
        operation_id=name,
        response_class=Response,
        openapi_extra=extra,
    )
    if method == "GET":
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _guarded(handler: Endpoint) -> Endpoint:
    """A handler whose foreseen errors become answers, and whose other errors are logged and become a 500."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            known = as_api_error(error)
            if known is None:
                logger.exception("%s %s failed", request.method, request.url.path)
                known = internal_error()
            return error_response(known)

    return endpoint


def _simple_endpoint(
    state: ServerState, kind: type[R], work: Callable[[ServerState, ServedModel, R], Awaitable[Struct]]
) -> Endpoint:
    decoder = BodyDecoder(kind, strict=state.config.strict_api)

    async def handler(request: Request) -> Response:
        model = state.model()
        decoded: Any = decoder.decode(await state.bodies.read(request))
        model.check_name(decoded.model)
        return _json(await work(state, model, decoded))

    return _guarded(handler)


def _completion_endpoint(
    state: ServerState, kind: type[S], prepare: Callable[[ServerState, ServedModel, S], Awaitable[Call]]
) -> Endpoint:
    decoder = BodyDecoder(kind, strict=state.config.strict_api)

    async def handler(request: Request) -> Response:
        with state.preparing() as served:
            return await answer(request, served)

    async def answer(request: Request, served: ServedModel) -> Response:
        decoded = decoder.decode(await state.bodies.read(request))
        served.check_name(decoded.model)
        model = served.for_class(service_class(decoded.service_tier, key_class(request.scope), served.engine.service))
        call = await prepare(state, model, decoded)
        generation = state.begin(model, call.jobs, call.names)
        try:
            generation.start(request.receive)
            if decoded.stream:
                first = await _first_news(generation, state.config.sse_ping_seconds)
                return EventStream(generation, call.writer(), first, state.config.sse_ping_seconds)
            whole = _json(await gathered(generation, call.gatherer()))
            whole.headers["x-request-id"] = call.envelope.id
        except BaseException:
            await generation.close()
            raise
        await generation.close()
        return whole

    return _guarded(handler)


async def _first_news(generation: Generation, patience: float) -> list[Event]:
    """Events up to the first tokens, so that an error before them keeps its status; [] when patience is over."""
    found: list[Event] = []
    while not any(isinstance(event.value, ChoiceDelta) for event in found):
        events = await generation.next_events(patience)
        if not events:
            break
        found += events
    return found


def _json(body: Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _status(text: str, status: int) -> Response:
    headers = {} if status == 200 else {"Retry-After": "5"}
    return Response(msgspec.json.encode(Status(status=text)), status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    code, reason, headers = None, str(error.detail), dict(error.headers or {})
    if error.status_code == 404:
        code, reason = "route_not_found", "there is no such route; GET /openapi.json lists what there is"
    elif error.status_code == 405:
        # A GET route answers HEAD as well, though the router knows them apart.
        allowed = {"GET": "GET, HEAD"}.get(headers["Allow"], headers["Allow"])
        headers["Allow"] = allowed
        code, reason = "method_not_allowed", f"this route takes {allowed}"
    message = f"{request.method} {request.url.path[:200]}: {reason}"
    return error_response(ApiError(Fault(error.status_code, message, code=code)), headers)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(internal_error())
