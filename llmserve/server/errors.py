"""Errors as clients see them: OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import InvalidRequestError, LlmserveError

INTERNAL_MESSAGE = "internal error; the server's log holds the details under this request id"
_FIELD = re.compile(r" - at `\$\.([A-Za-z_]+)")


class UnsupportedMediaTypeError(LlmserveError):
    """The body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"


class ClientDisconnectedError(Exception):
    """The client has gone: nobody is there to answer. Never leaves the server."""


def error_body(error: LlmserveError) -> bytes:
    """The JSON of an error answer, also used as the `data:` of an error in a stream."""
    return encode_error(error.message, error.type, param=error.param, code=error.code)


def encode_error(message: str, error_type: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object. Characters that UTF-8 cannot hold (lone surrogates) are replaced."""
    text = message.encode("utf-8", "replace").decode()
    return msgspec.json.encode({"error": {"message": text, "type": error_type, "param": param, "code": code}})


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def error_response(error: LlmserveError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return json_response(error_body(error), error.status, headers)


def internal_error_response() -> Response:
    """For a fault of ours: says nothing of its cause."""
    return json_response(encode_error(INTERNAL_MESSAGE, "server_error"), 500)


async def on_llmserve_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LlmserveError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown path or wrong method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} is not allowed here" if error.status_code == 405 else "no such path; see /v1/models"
    body = encode_error(text, "invalid_request_error")
    return json_response(body, error.status_code, error.headers)


def from_validation(error: msgspec.ValidationError) -> InvalidRequestError:
    """Names the top-level field that msgspec complained about."""
    found = _FIELD.search(str(error))
    return InvalidRequestError(str(error).replace("$.", "").replace("`$", "`body"), param=found[1] if found else None)
