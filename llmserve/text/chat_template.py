"""Conversations to prompts: the checkpoint's Jinja template, and text of users that stays text."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmserve.errors import InvalidRequestError
from llmserve.text.tokenizer import Tokenizer

Message = dict[str, Any]
# Private-use characters frame a number that stands for a special token's text in what users wrote.
MARK_OPEN, MARK_CLOSE = "\U000f0b01", "\U000f0b02"


class ChatTemplate:
    """A compiled template together with the tokenizer whose special tokens it writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, tokenizer.added_texts)) or r"(?!)")
        self._template: jinja2.Template | None = None
        if tokenizer.chat_template is not None:
            self._template = _environment().from_string(tokenizer.chat_template)

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt as text. Raises InvalidRequestError for anything that goes wrong while rendering."""
        messages = normalize_messages(messages)
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        if continue_final_message and (not messages or add_generation_prompt):
            raise InvalidRequestError(
                "continue_final_message needs a last message and add_generation_prompt=false",
                param="continue_final_message",
            )
        try:
            text = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:  # whatever a template does with this input, the input does not fit it
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def tokenize(self, messages: list[Message], *, escape_special_tokens: bool = True, **options: Any) -> list[int]:
        """The prompt as token ids.

        With `escape_special_tokens`, special tokens inside messages and tools are encoded as ordinary text, so that a
        user cannot forge a turn with `<|im_end|>`.
        """
        if not escape_special_tokens:
            return self._tokenizer.encode(self.render(messages, **options), allow_special=True)
        found: list[str] = []
        messages = self._mark(messages, found)
        if options.get("tools"):
            options["tools"] = self._mark(options["tools"], found)
        text = self.render(messages, **options)
        if not found:
            return self._tokenizer.encode(text, allow_special=True)
        token_ids: list[int] = []
        for index, piece in enumerate(re.split(f"{MARK_OPEN}(\\d+){MARK_CLOSE}", text)):
            if index % 2:
                token_ids += self._tokenizer.encode(found[int(piece)])
            elif piece:
                token_ids += self._tokenizer.encode(piece, allow_special=True)
        return token_ids

    def _mark(self, value: Any, found: list[str]) -> Any:
        """`value` with every special token's text in its strings replaced by a numbered mark."""
        if isinstance(value, str):
            plain = value.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")
            return self._special.sub(lambda match: self._number(match[0], found), plain)
        if isinstance(value, list):
            return [self._mark(item, found) for item in value]
        if isinstance(value, dict):
            return {self._mark(key, found): self._mark(item, found) for key, item in value.items()}
        return value

    def _number(self, text: str, found: list[str]) -> str:
        found.append(text)
        return f"{MARK_OPEN}{len(found) - 1}{MARK_CLOSE}"


def normalize_messages(messages: list[Message]) -> list[Message]:
    """What templates rely on: content is a string, empty tool_calls are absent, arguments are objects."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return [_normalize(message, index) for index, message in enumerate(messages)]


def _normalize(message: Message, index: int) -> Message:
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text_of(message.get("content"), index)
    if result.get("role") == "developer":
        result["role"] = "system"
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = [_normalize_call(call) for call in result["tool_calls"]]
    return result


def _normalize_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # not JSON: the template writes the string as it is
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"messages[{index}].content: parts of type {kind!r} are not supported, only 'text'", param="messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def _cut_after_final_message(text: str, messages: list[Message]) -> str:
    """End the prompt right after the last message's content, so that the model goes on with it."""
    content = messages[-1]["content"].rstrip()
    end = text.rfind(content)
    if end < 0 or not content:
        raise InvalidRequestError("the last message's content cannot be continued", param="continue_final_message")
    return text[: end + len(content)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As transformers defines it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
