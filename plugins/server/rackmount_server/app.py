"""The application: all routes over one engine."""

from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from rackmount import AsyncEngine
from rackmount_registry.plain import as_plain
from rackmount_server.errors import ApiError, add_error_handlers
from rackmount_server.gate import Gate
from rackmount_server.generation import add_generation, chat_messages
from rackmount_server.reply import Json, whole
from rackmount_server.requests import DetokenizeRequest, TokenizeChat, TokenizeRequest
from rackmount_server.service import Service
from rackmount_server.settings import ServerSettings

PAGE_POLICY = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def build_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The ASGI application; the engine stays its owner's, who closes it, and before that
    `app.state.admission`."""
    service = Service(engine, settings)
    app = FastAPI(
        title="rackmount",
        version=version("rackmount-core"),
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
    )
    app.state.admission = service.admission
    add_error_handlers(app)
    add_generation(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    app.add_middleware(Gate, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
    return app


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "rackmount",
            "root": service.engine.config.model,
            "max_model_len": service.engine.model_info.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.model_name(name))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
        service.model_name(asked.model)
        return await whole(request, tokenized(asked))

    async def tokenized(asked: TokenizeRequest) -> dict[str, Any]:
        if isinstance(asked, TokenizeChat):
            messages, options = chat_messages(service, asked), asked.template_options()
            (ids,) = await service.tokenizing.encode(
                [messages], "messages", template_options=options
            )
        else:
            ids = await service.tokenizing.tokenize(asked.prompt, asked.add_special_tokens)
        reply = {
            "count": len(ids),
            "max_model_len": service.engine.model_info.max_model_len,
            "tokens": ids,
        }
        if asked.return_token_strs:
            reply["token_strs"] = [service.token_texts.text(token_id) for token_id in ids]
        return reply

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request) -> Response:
        service.model_name(asked.model)
        return await whole(request, detokenized(asked))

    async def detokenized(asked: DetokenizeRequest) -> dict[str, str]:
        return {"prompt": await service.tokenizing.detokenize(asked.tokens)}


def _add_state(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine lives."""
        if not engine.is_alive:
            raise ApiError(503, engine.failure or "the engine is down", code="engine_unavailable")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether a request would be taken now."""
        try:
            service.admission.check()
        except ApiError as error:
            raise ApiError(503, str(error), code=error.code, headers=error.headers) from error
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        await service.metrics.refresh()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> Response:
        """The rack as it stands: what is mounted and why, and what it does."""
        return Json(
            {
                "version": app.version,
                "model_names": service.settings.model_names,
                "started_at": service.started_at,
                "is_alive": engine.is_alive,
                "failure": engine.failure,
                "description": engine.description,
                "config": as_plain(engine.config),
                "stats": as_plain(engine.stats),
                "num_unfinished": engine.num_unfinished,
                "num_waiting": engine.num_waiting,
                "latencies": service.metrics.percentiles(),
            }
        )

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        text = files("rackmount_server").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=PAGE_POLICY)
