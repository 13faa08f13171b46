"""API keys, request ids, unknown paths, the access log, and errors below the endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from .raw_http import error_of, exchange, status_of
from .site import HI, Site

KEYS = ["first-key", "schlüssel-ключ", "clé"]


@pytest.fixture(scope="module")
def locked() -> Iterator[Site]:
    site = Site(api_keys=KEYS)
    yield site
    site.close()


def ask(site: Site, *lines: bytes, path: bytes = b"/v1/models") -> bytes:
    request = b"GET " + path + b" HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
    return asyncio.run(exchange(site.port, request + b"".join(line + b"\r\n" for line in lines) + b"\r\n"))


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Bearer first-key",
        b"authorization: bearer first-key",
        b"Authorization: Bearer " + KEYS[1].encode(),
        b"Authorization: Bearer " + KEYS[2].encode(),
        b"Authorization: Bearer " + KEYS[2].encode("latin-1"),
    ],
)
def test_right_keys(locked: Site, line: bytes) -> None:
    """B092: non-ASCII keys too."""
    assert status_of(ask(locked, line)) == 200


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"Authorization: Bearer wrong"],
        [b"Authorization: Bearer first-ke"],
        [b"Authorization: Bearer first-key2"],
        [b"Authorization: Bearer \xff\xfe\x80"],
        [b"Authorization: Bearer ????????-????"],
        [b"Authorization: Bearer"],
        [b"Authorization: Bearer "],
        [b"Authorization:"],
        [b"Authorization: Basic first-key"],
        [b"Authorization: first-key"],
        [b"Authorization: Bearerfirst-key"],
        [b"Authorization: Bearer first-key", b"Authorization: Bearer first-key"],
        [b"Authorization: Bearer wrong", b"Authorization: Bearer first-key"],
        [b"X-Api-Key: first-key"],
    ],
)
def test_wrong_keys(locked: Site, lines: list[bytes]) -> None:
    """B092: 401, never 500, for wrong, empty, doubled and non-ASCII keys and wrong schemes."""
    answer = ask(locked, *lines)
    assert status_of(answer) == 401
    assert error_of(answer)["type"] == "authentication_error"
    assert b"www-authenticate: Bearer" in answer


def test_key_in_the_query_string_does_not_count(locked: Site) -> None:
    """B092."""
    assert status_of(ask(locked, path=b"/v1/models?api_key=first-key&key=first-key")) == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics"])
def test_probes_need_no_key(locked: Site, path: str) -> None:
    assert locked.client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models/x", "/nothing", "/health/", "//health", "/v1/../health"])
def test_everything_else_needs_one(locked: Site, path: str) -> None:
    assert status_of(ask(locked, path=path.encode())) == 401


def test_unauthorised_body_is_not_read_into_the_engine(locked: Site) -> None:
    assert locked.chat().status_code == 401
    assert locked.backend.requests == []


def test_request_ids(site: Site) -> None:
    given = site.client.get("/ping", headers={"x-request-id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    forged = site.client.get("/ping", headers={"x-request-id": "a b\tc"})
    assert forged.headers["x-request-id"] != "a b\tc" and len(forged.headers["x-request-id"]) == 32
    assert site.chat(stream=True).headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/%00%ff", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_unknown_paths_and_methods(site: Site, method: str, path: str, status: int) -> None:
    response = site.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=latin-1", 415),
        ("\xff", 415),
        ("application/json; charset=UTF-8", 200),
        ("application/JSON", 200),
    ],
)
def test_content_types(site: Site, content_type: str, status: int) -> None:
    body = b'{"model":"demo","messages":[{"role":"user","content":"hi"}]}'
    response = site.client.post(
        "/v1/chat/completions", content=body, headers={b"content-type": content_type.encode("latin-1")}
    )
    assert response.status_code == status, response.text


def test_body_without_content_type_is_read_as_json(site: Site) -> None:
    assert site.client.post("/v1/completions", content=b'{"model":"demo","prompt":"x"}').status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xef\xbb\xbf{}",
        b"[" * 10_000,
        b'{"model":"demo","model":"demo"}',
        b'{"model":NaN}',
        b"\x00",
        b"null",
    ],
)
def test_bodies_that_are_not_json(site: Site, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = site.client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_body_over_the_limit_through_a_client() -> None:
    site = Site(max_body_bytes=10_000)
    try:
        response = site.chat(messages=[{"role": "user", "content": "x" * 20_000}])
        assert response.status_code == 413 and "10000" in response.json()["error"]["message"]
        assert site.chat().status_code == 200
    finally:
        site.close()


def test_access_log_holds_no_query_and_no_control_characters(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llmserve.access"):
        site.client.get("/ping%0aforged%1b[31m?api_key=secret")
        site.wait_for(lambda: caplog.messages)
    assert "secret" not in caplog.text and "\x1b" not in caplog.text and "\nforged" not in caplog.text
    assert " 404 " in caplog.text


def test_long_strings_of_users_are_cut_in_messages(site: Site) -> None:
    response = site.chat(model="x" * 100_000)
    assert response.status_code == 404 and len(response.text) < 1000
    assert len(site.chat(messages=HI, response_format={"type": "y" * 100_000}).text) < 1000
