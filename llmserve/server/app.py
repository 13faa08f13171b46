"""The ASGI application: every path, and the layer around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from llmserve.config import ServerConfig
from llmserve.control.backend import Backend
from llmserve.errors import LlmserveError
from llmserve.pipeline import TextPipeline
from llmserve.server import health, models
from llmserve.server.access import AccessLayer
from llmserve.server.chat import chat_completions
from llmserve.server.completions import completions
from llmserve.server.context import ServerContext
from llmserve.server.errors import on_http_exception, on_llmserve_error
from llmserve.server.metrics import metrics_endpoint

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models.list_models),
    Route("/v1/models/{model:path}", models.get_model),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/ping", health.ping),
    Route("/version", health.version),
    Route("/metrics", metrics_endpoint),
]


def build_app(pipeline: TextPipeline, config: ServerConfig, backend: Backend) -> Starlette:
    """The application owns nothing that must be started or stopped: who made the backend also stops it.

    Limits on headers, body size and receive times are kept by the protocol (protocol.py), below the application.
    """
    context = ServerContext(pipeline, backend, config)
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(AccessLayer, api_keys=config.api_keys, metrics=context.metrics)],
        exception_handlers={LlmserveError: on_llmserve_error, HTTPException: on_http_exception},
    )
    app.state.context = context
    app.router.redirect_slashes = False
    return app
