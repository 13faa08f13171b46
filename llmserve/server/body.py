"""From the bytes of a request to a typed Struct. Whatever the bytes are, the outcome is a Struct or a 4xx error."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from llmserve.errors import InvalidRequestError
from llmserve.server.errors import ClientDisconnectedError, UnsupportedMediaTypeError, from_validation

MAX_DEPTH = 64  # nesting of arrays and objects: far above any tool schema, far below what recursion can take
MAX_CONTAINERS = 100_000  # arrays and objects in one body
_BOM = b"\xef\xbb\xbf"
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # linear on any input: possessive, and never without a match
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


async def read_struct(request: Request, kind: type[T]) -> T:
    """Read and decode a body. Its size was limited by the protocol, before it was buffered."""
    _check_content_type(request)
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    return decode(body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode JSON strictly: no NaN, no duplicate keys, no byte order mark, bounded nesting.

    Raises InvalidRequestError that names the field, or the position, and what was expected.
    """
    if body.startswith(_BOM):
        raise InvalidRequestError("the body starts with a byte order mark; send plain UTF-8 JSON")
    _check_depth(body)
    try:
        value = msgspec.json.decode(body, type=kind)
        json.loads(body, object_pairs_hook=_refuse_duplicates)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise InvalidRequestError(_TOO_DEEP) from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: what json refuses in fields that msgspec skips
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    return value


_TOO_DEEP = f"the JSON is nested more than {MAX_DEPTH} levels deep, or holds more than {MAX_CONTAINERS} containers"


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "application/json")
    media_type, _, parameters = given.partition(";")
    media_type = media_type.strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(f"Content-Type must be application/json, got {given[:100]!r}")
    name, _, charset = parameters.partition("=")
    if name.strip().lower() == "charset" and charset.strip().strip('"').lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaTypeError(f"the charset must be utf-8, got {charset[:100]!r}")


def _check_depth(body: bytes) -> None:
    """Count nesting without recursion: each pass over the bare brackets removes the innermost pairs."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(_TO_SQUARE, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise InvalidRequestError(_TOO_DEEP)
    for _ in range(MAX_DEPTH):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            return  # nothing left, or not JSON: the parser says what is wrong
        brackets = shorter
    if brackets:
        raise InvalidRequestError(_TOO_DEEP)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:100]!r} occurs twice in one object")
        seen.add(key)
