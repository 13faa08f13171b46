"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from llmserve.errors import InvalidRequestError
from llmserve.pipeline import TextDelta, TextRequest
from llmserve.server.answer import Answer, Collected
from llmserve.server.body import read_struct
from llmserve.server.chunks import ChunkFrame, encode_json, stream_chunks
from llmserve.server.context import Identity, ServerContext
from llmserve.server.errors import json_response
from llmserve.server.logprobs import chat_logprobs, prompt_logprobs
from llmserve.server.responses import AnswerMessage, ChatAnswer, ChatChoice, ChatChunkChoice, DeltaMessage
from llmserve.server.schemas import ChatRequest
from llmserve.server.streaming import EventStream, until_disconnect

RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "escape_special_tokens", "self"}
)


async def chat_completions(request: Request) -> ASGIApp:
    context = ServerContext.of(request)
    body = await read_struct(request, ChatRequest)
    context.check_model(body.model)
    body.check()
    identity = context.identity("chatcmpl")
    text_request = await _text_request(context, body, identity.id)
    answer = Answer(context.pipeline, context.metrics, [text_request], text_request.params.n)
    if body.stream:
        if body.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs is not available in a stream", param="prompt_logprobs")
        frame = ChunkFrame(identity, "chat.completion.chunk", usage=body.include_usage)
        return EventStream(stream_chunks(answer, frame, ChoiceChunks(body, answer).encode, body))
    return await until_disconnect(request.receive, _whole(answer, identity, body))


async def _text_request(context: ServerContext, body: ChatRequest, request_id: str) -> TextRequest:
    params = body.sampling_params(
        context.pipeline.tokenizer.default_sampling, max_tokens=body.output_limit(), logprobs=body.num_logprobs()
    )
    text_request = TextRequest(
        prompt_token_ids=await context.pipeline.tokenize_chat_async(
            msgspec.to_builtins(body.messages), **_template_options(body)
        ),
        params=params,
        request_id=request_id,
        cache_salt=body.cache_salt or "",
    )
    context.pipeline.validate(text_request, context.model())
    return text_request


def _template_options(body: ChatRequest) -> dict[str, Any]:
    kwargs = body.chat_template_kwargs or {}
    if reserved := RESERVED_TEMPLATE_NAMES & kwargs.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}: the server sets it itself",
            param="chat_template_kwargs",
        )
    options: dict[str, Any] = dict(kwargs)
    if body.tools and body.tool_choice != "none":
        options["tools"] = body.tools
    continues = bool(body.continue_final_message)
    options["continue_final_message"] = continues
    options["add_generation_prompt"] = (
        not continues if body.add_generation_prompt is None else body.add_generation_prompt
    )
    return options


class ChoiceChunks:
    """Encodes the deltas of a stream as choices. The first chunk of each choice names the role."""

    def __init__(self, body: ChatRequest, answer: Answer) -> None:
        self._logprobs = body.logprobs
        self._token_ids = body.return_token_ids
        self._plain = not body.logprobs and not body.return_token_ids
        self._heads: list[bytes] = [b""] * len(answer.progress)  # b"": no chunk yet

    def encode(self, index: int, delta: TextDelta) -> bytes | None:
        """JSON of one choice, or None when there is nothing to tell (its text is held back)."""
        head = self._heads[index]
        if head and self._plain and delta.finish_reason is None:
            if not delta.text:
                return None
            return b'%b%b},"logprobs":null,"finish_reason":null}' % (head, encode_json(delta.text))
        self._heads[index] = b'{"index":%d,"delta":{"content":' % index
        return encode_json(self._full(index, delta, first=not head))

    def _full(self, index: int, delta: TextDelta, *, first: bool) -> ChatChunkChoice:
        message = DeltaMessage("assistant", delta.text) if first else DeltaMessage(UNSET, delta.text or UNSET)
        choice = ChatChunkChoice(index=index, delta=message, finish_reason=delta.finish_reason)
        if self._logprobs and delta.logprobs:
            choice.logprobs = chat_logprobs(delta.logprobs)
        if self._token_ids:
            choice.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        return choice


async def _whole(answer: Answer, identity: Identity, body: ChatRequest) -> Response:
    choices = await answer.collect()
    result = ChatAnswer(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[_choice(index, choice, body) for index, choice in enumerate(choices)],
        usage=answer.usage(),
    )
    if body.return_token_ids:
        result.prompt_token_ids = answer.requests[0].prompt_token_ids
    if body.prompt_logprobs is not None:
        result.prompt_logprobs = prompt_logprobs(choices[0].prompt_logprobs)
    if body.return_metadata:
        result.llmserve = answer.handoff()
    return json_response(encode_json(result))


def _choice(index: int, collected: Collected, body: ChatRequest) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=AnswerMessage(content=collected.text),
        logprobs=chat_logprobs(collected.logprobs) if body.logprobs else None,
        finish_reason=collected.finish_reason,
        stop_reason=collected.stop_reason,
        token_ids=collected.token_ids if body.return_token_ids else UNSET,
    )
