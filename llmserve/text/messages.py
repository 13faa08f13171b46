"""Messages as clients send them, made what chat templates rely on."""

from __future__ import annotations

import json
from typing import Any

from llmserve.errors import InvalidRequestError

Message = dict[str, Any]


def normalize_messages(messages: list[Message]) -> list[Message]:
    """New messages whose content is a string, whose tool calls hold objects, and whose absent fields are absent.

    Raises InvalidRequestError that names the message and what is wrong with it.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Message, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role", param="messages")
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text_of(message.get("content"), where)
    if result["role"] == "developer":  # OpenAI's newer name, which templates do not know
        result["role"] = "system"
    calls = result.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InvalidRequestError(f"{where}.tool_calls must be a list of objects", param="messages")
        result["tool_calls"] = [_normalize_call(call) for call in calls]
    return result


def _normalize_call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send arguments as a JSON string; templates write them as JSON again."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # not JSON, as a model may have written it: the template repeats the string
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{where}.content: parts of type {kind!r} are not supported, only 'text' with a string",
                param="messages",
            )
        texts.append(part["text"])
    return "".join(texts)
