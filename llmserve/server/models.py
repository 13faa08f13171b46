"""/v1/models: the one model that this server serves."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llmserve.server.context import ServerContext
from llmserve.server.errors import json_response


async def list_models(request: Request) -> Response:
    card = _card(ServerContext.of(request))
    return json_response(msgspec.json.encode({"object": "list", "data": [card]}))


async def get_model(request: Request) -> Response:
    context = ServerContext.of(request)
    context.check_model(request.path_params["model"])
    return json_response(msgspec.json.encode(_card(context)))


def _card(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.served_name(),
        "object": "model",
        "created": context.started,
        "owned_by": "llmserve",
        "max_model_len": context.model().max_model_len,
    }
