"""Run the HTTP server inside the current event loop, until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from llmserve.config import ServerConfig
from llmserve.control.backend import Backend
from llmserve.errors import ConfigError
from llmserve.pipeline import TextPipeline
from llmserve.server.app import build_app
from llmserve.server.protocol import protocol_class

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: so they, not we, close first
SHUTDOWN_GRACE_S = 5  # for answers under way when the server stops; then they end with an error


async def serve(
    pipeline: TextPipeline,
    backend: Backend,
    config: ServerConfig,
    *,
    on_bound: Callable[[int], None] | None = None,
) -> None:
    """Serve until cancelled; then refuse new connections, give running answers SHUTDOWN_GRACE_S, and return.

    `on_bound` is called with the port once connections are accepted (config.port 0 lets the system choose it).
    Raises ConfigError when the address cannot be bound. Signals are left to the caller.
    """
    listener = _bind(config.host, config.port)
    server = _Server(
        uvicorn.Config(
            build_app(pipeline, config, backend),
            http=protocol_class(config),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
    )
    port = listener.getsockname()[1]
    server.when_started = lambda: _announce(config.host, port, on_bound)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        server.should_exit = True
        await running
        raise
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: this process has more to stop than HTTP."""

    when_started: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.when_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"port must be between 0 and 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"http-host {host!r}, port {port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host!r}, port {port}: {error}") from error
    listener.setblocking(False)
    return listener


def _announce(host: str, port: int, on_bound: Callable[[int], None] | None) -> None:
    logger.info("listening on http://%s:%d", host, port)
    if on_bound is not None:
        on_bound(port)
