"""What clients may send. Unknown fields are ignored, null means absent, whole numbers may be written as 1.0.

Sampling parameters that a request leaves out come from the model's generation_config.json. Extensions beyond OpenAI's
API: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, skip_special_tokens,
include_stop_str_in_output, prompt_logprobs, cache_salt, return_token_ids, return_metadata; for chat also
chat_template_kwargs, add_generation_prompt, continue_final_message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from llmserve.errors import InvalidRequestError
from llmserve.sampling_params import MAX_LOGIT_BIAS_ENTRIES, MAX_TOP_LOGPROBS, SamplingParams

MAX_CACHE_SALT_CHARS = 256
Integer = int | float  # clients in JavaScript or Lua send 1.0; `whole` refuses 1.5

_INTEGERS = ("n", "seed", "top_k", "min_tokens", "prompt_logprobs")
_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: one last chunk with the usage. continuous_usage_stats: the usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_metadata: bool | None = None

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: Integer | None, logprobs: int | None
    ) -> SamplingParams:
        """Sampling parameters, not yet validated against the model. `defaults` are the model's own."""
        values: dict[str, Any] = dict(defaults)
        for name in _PLAIN:
            if (value := getattr(self, name)) is not None:
                values[name] = value
        for name in _INTEGERS:
            if (number := whole(name, getattr(self, name))) is not None:
                values[name] = number
        values |= {"max_tokens": whole("max_tokens", max_tokens), "logprobs": logprobs}
        if self.stop is not None:
            values["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = [whole("stop_token_ids", token_id) for token_id in self.stop_token_ids]
        if self.logit_bias is not None:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        return SamplingParams(**values)

    def check_shared(self) -> None:
        """Rules between fields that have nothing to do with sampling."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
        if self.cache_salt is not None and len(self.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt may have at most {MAX_CACHE_SALT_CHARS} characters, got {len(self.cache_salt)}",
                param="cache_salt",
            )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def check(self, index: int) -> None:
        """Only text, and text for every role but the assistant, who may only have called tools."""
        where = f"messages[{index}].content"
        if self.content is None and self.role != "assistant":
            raise InvalidRequestError(f"{where} is required for the role {self.role!r}", param="messages")
        for part in self.content if isinstance(self.content, list) else ():
            if part.type != "text":
                raise InvalidRequestError(
                    f"{where}: parts of type {part.type[:40]!r} are not supported, this model reads only 'text'",
                    param="messages",
                )
            if part.text is None:
                raise InvalidRequestError(f"{where}: a part of type 'text' needs the field 'text'", param="messages")


class FunctionTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: FunctionTool
    type: Literal["function"] = "function"


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str


class ChatRequest(SamplingFields, kw_only=True):
    """Body of /v1/chat/completions. max_tokens (or max_completion_tokens) of 0 is refused: the least is 1."""

    messages: list[ChatMessage]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: list[dict[str, Any]] | None = None  # given to the template as they are
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Everything that can be refused without the model. Raises InvalidRequestError."""
        self.check_shared()
        if not self.messages:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        for index, message in enumerate(self.messages):
            message.check(index)
        self._check_tools()
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "add_generation_prompt and continue_final_message exclude each other", param="add_generation_prompt"
                )
            if self.messages[-1].role != "assistant" or not self.messages[-1].content:
                raise InvalidRequestError(
                    "continue_final_message needs a last message with the role 'assistant' and some content",
                    param="continue_final_message",
                )

    def num_logprobs(self) -> int | None:
        """None: no log-probabilities; k: those of each token and of the k most likely."""
        top = whole("top_logprobs", self.top_logprobs)
        if top is None:
            return 0 if self.logprobs else None
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {top}", param="top_logprobs"
            )
        if not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return top

    def output_limit(self) -> Integer | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _check_tools(self) -> None:
        for index, tool in enumerate(self.tools or ()):
            try:
                msgspec.convert(tool, Tool)
            except msgspec.ValidationError as error:
                raise InvalidRequestError(f"tools[{index}]: {error}", param="tools") from None
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequestError(
                f"response_format {self.response_format.type[:40]!r} is not supported yet, only 'text' is",
                param="response_format",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError(
                "tool_choice: only 'none' and 'auto' are supported; 'required' and named tools are not supported yet",
                param="tool_choice",
            )


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions. Without max_tokens up to 16 tokens are generated, as OpenAI does."""

    prompt: str | list[str | Integer | list[Integer]]
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Everything that can be refused without the model. Raises InvalidRequestError."""
        self.check_shared()
        if self.suffix:
            raise InvalidRequestError("suffix is not supported: this model only continues a text", param="suffix")
        best_of = whole("best_of", self.best_of)
        if best_of is not None and best_of != (whole("n", self.n) or 1):
            raise InvalidRequestError(f"best_of must be absent or equal to n, got {best_of}", param="best_of")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises InvalidRequestError for empty or mixed ones."""
        if isinstance(self.prompt, str):
            prompts: list[str | list[int]] = [self.prompt]
        elif self.prompt and all(isinstance(item, int | float) for item in self.prompt):
            prompts = [_token_ids(self.prompt)]
        else:
            prompts = [item if isinstance(item, str) else _token_ids(item) for item in self.prompt]
        if not prompts or not all(prompts):
            raise InvalidRequestError("prompt must not be empty: give text or at least one token id", param="prompt")
        return prompts


def whole(name: str, value: Integer | None) -> int | None:
    """An integer, also when it was written as 1.0."""
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidRequestError(f"{name} must be an integer, got {value}", param=name)
        return int(value)
    return value


def _token_ids(items: Any) -> list[int]:
    if not isinstance(items, list) or any(isinstance(item, str | list) for item in items):
        raise InvalidRequestError(
            "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
            param="prompt",
        )
    return [item if type(item) is int else _required_id(item) for item in items]


def _required_id(value: float) -> int:
    token_id = whole("prompt", value)
    assert token_id is not None
    return token_id


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequestError(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(given)}", param="logit_bias"
        )
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 18:
            raise InvalidRequestError(
                f"logit_bias: keys must be token ids such as '123', got {key[:40]!r}", param="logit_bias"
            )
        bias[int(key)] = value
    return bias
