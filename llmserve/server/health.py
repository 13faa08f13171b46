"""Probes. /health: does work move forward? /ready: could a request be served now? /ping: is this process alive?"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import llmserve
from llmserve.control.backend import WorkerStatus
from llmserve.server.context import ServerContext
from llmserve.server.errors import json_response


async def health(request: Request) -> Response:
    """200 only while every worker that has work finishes steps; the workers are listed whatever the status."""
    backend = ServerContext.of(request).backend
    progressing = backend.progressing()
    body = {
        "status": "ok" if progressing else "no progress",
        "ready": backend.ready(),
        "workers": [_describe(worker) for worker in backend.workers()],
    }
    return json_response(msgspec.json.encode(body), 200 if progressing else 503)


async def ready(request: Request) -> Response:
    is_ready = ServerContext.of(request).backend.ready()
    return json_response(msgspec.json.encode({"ready": is_ready}), 200 if is_ready else 503)


async def ping(_: Request) -> Response:
    return json_response(b'{"status":"alive"}')


async def version(_: Request) -> Response:
    return json_response(msgspec.json.encode({"version": llmserve.__version__}))


def _describe(worker: WorkerStatus) -> dict[str, Any]:
    load = worker.load
    return {
        "worker_id": worker.worker_id,
        "instance_id": worker.instance_id,
        "role": worker.role,
        "pid": worker.pid,
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "free_pages": load.free_pages,
        "cached_pages": load.cached_pages,
        "quarantined_pages": load.quarantined_pages,
        "total_pages": load.total_pages,
        "steps": load.steps,
        "stalled_s": load.stalled_s,
    }
