"""The outermost layer: request ids, API keys, the access log, and the answer to our own faults."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmserve.errors import AuthenticationError, UnavailableError
from llmserve.server.errors import ClientDisconnectedError, error_response, internal_error_response
from llmserve.server.metrics import ServerMetrics

logger = logging.getLogger("llmserve.access")

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})  # for probes and Prometheus: no key
CLIENT_CLOSED = 499  # nginx's status for "the client left"; only ever in the log and the metrics
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class AccessLayer:
    """ASGI middleware. Every answer carries `x-request-id`: the client's, if well-formed, or a new one."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], metrics: ServerMetrics) -> None:
        self.app = app
        self.keys = [spelling for key in api_keys for spelling in _spellings(key)]
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            self._authenticate(scope)
            await self.app(scope, receive, send_with_id)
        except AuthenticationError as error:
            response = error_response(error)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send_with_id)
        except ClientDisconnectedError:
            status = CLIENT_CLOSED
        except asyncio.CancelledError:  # the server stops and its patience is over
            if status:
                raise
            await error_response(UnavailableError("the server is shutting down"))(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id.decode())
            if status:
                raise  # uvicorn closes the connection: the client must not take half an answer for a whole one
            await internal_error_response()(scope, receive, send_with_id)
        finally:
            self.metrics.count_http(scope, status)
            self._log(scope, status, time.perf_counter() - started, request_id)

    def _authenticate(self, scope: Scope) -> None:
        """Raises AuthenticationError unless exactly one Authorization header carries one of the keys."""
        if not self.keys or scope["path"] in OPEN_PATHS:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            raise AuthenticationError(
                f"send one header 'Authorization: Bearer KEY', got {len(given)}", code="invalid_api_key"
            )
        scheme, _, token = given[0].partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise AuthenticationError("the Authorization header must read 'Bearer KEY'", code="invalid_api_key")
        # Compared with every key, each in constant time: the time tells nothing of which key was close.
        if not any([hmac.compare_digest(token.strip(), key) for key in self.keys]):
            raise AuthenticationError("this API key is not valid here", code="invalid_api_key")

    def _log(self, scope: Scope, status: int, seconds: float, request_id: bytes) -> None:
        """The query string is left out: clients put keys there by mistake."""
        if logger.isEnabledFor(logging.INFO):
            client = scope["client"][0] if scope.get("client") else "-"
            path = scope["path"][:200].encode("ascii", "backslashreplace").decode()
            safe = "".join(character if character.isprintable() else "?" for character in path)
            logger.info(
                "%s %s %s %d %.1f ms %s", client, scope["method"], safe, status, seconds * 1e3, request_id.decode()
            )


def _spellings(key: str) -> set[bytes]:
    """Clients send what is not ASCII as UTF-8 or as Latin-1: both are the same key."""
    spellings = {key.encode()}
    if all(ord(character) < 256 for character in key):
        spellings.add(key.encode("latin-1"))
    return spellings


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
