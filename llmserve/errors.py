"""Errors that cross rooms. Each knows the HTTP status and OpenAI error type that the server answers with."""

from __future__ import annotations


class LlmserveError(Exception):
    """Base of all errors that a caller can act on."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(LlmserveError):
    """The request is wrong: `param` names the field, the message names the limit."""

    status = 400
    type = "invalid_request_error"


class NotFoundError(LlmserveError):
    """The named model or resource does not exist."""

    status = 404
    type = "not_found_error"


class AuthenticationError(LlmserveError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"


class OverloadedError(LlmserveError):
    """The queue is full; the caller may try again later."""

    status = 429
    type = "rate_limit_error"


class UnavailableError(LlmserveError):
    """No worker can take the request now, or the worker that had it is gone."""

    status = 503
    type = "service_unavailable_error"


class CheckpointError(LlmserveError):
    """A checkpoint cannot be loaded: the message names the tensor and the file."""


class ConfigError(LlmserveError):
    """A wrong option at start: the message names the option and what it accepts."""


_BY_STATUS: dict[int, type[LlmserveError]] = {
    kind.status: kind
    for kind in (InvalidRequestError, NotFoundError, AuthenticationError, OverloadedError, UnavailableError)
}


def error_from_status(status: int, message: str, *, param: str | None = None, code: str | None = None) -> LlmserveError:
    """Rebuild an error that travelled between processes as (status, message, param, code)."""
    return _BY_STATUS.get(status, LlmserveError)(message, param=param, code=code)
