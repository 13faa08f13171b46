"""Conversations to prompts: the checkpoint's Jinja template, and text of users that stays text."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmserve.errors import CheckpointError, InvalidRequestError
from llmserve.text.messages import Message, normalize_messages
from llmserve.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer

MAX_PROMPT_CHARS = 32 * 1024 * 1024
RENDER_TIMEOUT_S = 30.0
CHARS_PER_ITEM = 50  # rendering a list item or a field takes as long as that many characters


class ChatTemplate:
    """A compiled template together with the tokenizer whose special tokens it writes.

    Raises CheckpointError for a template that is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = _any_of(tokenizer.control_texts)
        self._added = _any_of(tokenizer.added_texts)
        self._template: jinja2.Template | None = None
        if tokenizer.chat_template is not None:
            try:
                self._template = _environment().from_string(tokenizer.chat_template)
            except jinja2.TemplateError as error:
                raise CheckpointError(f"the checkpoint's chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt as text. `options` are further variables of the template, such as `enable_thinking`.

        continue_final_message: end inside the last message, so that the model goes on with it.
        Raises InvalidRequestError for anything that goes wrong while rendering.
        """
        messages = normalize_messages(messages)
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt=false", param="continue_final_message"
            )
        tag = ""
        if continue_final_message:
            tag = f"end{secrets.token_hex(8)}"
            # The blank tells whether the template trims: then the content's own blanks are trimmed as well.
            messages[-1]["content"] += tag + " "
        variables = {**self._tokenizer.named_tokens, **options, "messages": messages, "tools": tools}
        text = _render(self._template, {**variables, "add_generation_prompt": add_generation_prompt})
        return _cut_at(tag, text) if tag else text

    def tokenize(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        escape_special_tokens: bool = True,
        **options: Any,
    ) -> list[int]:
        """The prompt as token ids; `options` as in `render`.

        With `escape_special_tokens`, special tokens that come from outside are encoded as ordinary text, so that
        nobody forges a turn with `<|im_end|>`. In tools and their answers, which third parties write, this holds for
        markup such as `</tool_response>` too. Elsewhere markup passes: templates look for `</think>` in answers.
        """
        if not escape_special_tokens:
            text = self.render(messages, tools=tools, **options)
            return self._tokenizer.encode(text, allow_special=True)
        escape = _Escape()
        try:
            # Only what has its final form can be searched: text parts joined, arguments parsed.
            messages = [
                escape.mark(message, self._added if message["role"] == "tool" else self._control)
                for message in normalize_messages(messages)
            ]
            tools = escape.mark(tools, self._added)
            options = escape.mark(options, self._control)
        except RecursionError:
            raise InvalidRequestError("messages or tools are nested too deeply", param="messages") from None
        text = self.render(messages, tools=tools, **options)
        token_ids: list[int] = []
        for piece, is_special in escape.pieces(text):
            token_ids += self._tokenizer.encode(piece, allow_special=is_special)
        return token_ids

    async def tokenize_async(self, messages: list[Message], **options: Any) -> list[int]:
        """`tokenize`; a long conversation is handled in a thread, so that the event loop goes on."""
        if not _is_large(messages, options):
            return self.tokenize(messages, **options)
        return await asyncio.to_thread(self.tokenize, messages, **options)


class _Escape:
    """Replaces special tokens in values by marks before rendering, and finds them again in the rendered text.

    A mark is plain ASCII letters and digits, so that it survives any filter of a template, with a random part, so that
    nobody can write one.
    """

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._found: list[str] = []

    def mark(self, value: Any, special: re.Pattern[str]) -> Any:
        """`value` with marks in all of its strings, keys of objects included."""
        if isinstance(value, str):
            return special.sub(self._mark_of, value)
        if isinstance(value, list | tuple):
            return [self.mark(item, special) for item in value]
        if isinstance(value, dict):
            return {self.mark(key, special): self.mark(item, special) for key, item in value.items()}
        return value

    def pieces(self, text: str) -> Iterable[tuple[str, bool]]:
        """Rendered text as (piece, whether its special tokens are real); the pieces add up to the prompt."""
        if not self._found:
            return [(text, True)]
        parts = re.split(f"mark{self._nonce}x(\\d+)x", text)
        return [
            (self._found[int(part)], False) if index % 2 else (part, True) for index, part in enumerate(parts) if part
        ]

    def _mark_of(self, match: re.Match[str]) -> str:
        self._found.append(match[0])
        return f"mark{self._nonce}x{len(self._found) - 1}x"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    deadline = time.monotonic() + RENDER_TIMEOUT_S
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PROMPT_CHARS or time.monotonic() > deadline:
                raise InvalidRequestError(
                    f"the conversation is too long: rendering it gave more than {MAX_PROMPT_CHARS} characters "
                    f"or took more than {RENDER_TIMEOUT_S:g} s",
                    param="messages",
                )
    except InvalidRequestError:
        raise
    except Exception as error:  # whatever a template does with this input, the input does not fit it
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    return "".join(pieces)


def _cut_at(tag: str, text: str) -> str:
    """The text up to the tag at the end of the last message's content."""
    end = text.rfind(tag)
    if end < 0:
        raise InvalidRequestError(
            "the chat template leaves the last message's content out, so it cannot be continued",
            param="continue_final_message",
        )
    keeps_blanks = text.startswith(" ", end + len(tag))
    return text[:end] if keeps_blanks else text[:end].rstrip()


def _is_large(*values: Any) -> bool:
    """True when rendering and encoding these values would hold the event loop up."""
    size, stack = 0, list(values)
    while stack and size < LARGE_TEXT_CHARS:
        value = stack.pop()
        size += CHARS_PER_ITEM
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return size >= LARGE_TEXT_CHARS


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
