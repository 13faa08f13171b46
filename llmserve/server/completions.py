"""POST /v1/completions."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from llmserve.control.messages import ModelInfo
from llmserve.errors import InvalidRequestError
from llmserve.pipeline import TextDelta, TextRequest
from llmserve.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from llmserve.server.answer import Answer, Collected
from llmserve.server.body import read_struct
from llmserve.server.chunks import ChunkFrame, encode_json, stream_chunks
from llmserve.server.context import Identity, ServerContext
from llmserve.server.errors import json_response
from llmserve.server.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from llmserve.server.responses import CompletionAnswer, CompletionChoice
from llmserve.server.schemas import CompletionRequest, whole
from llmserve.server.streaming import EventStream, until_disconnect

DEFAULT_MAX_TOKENS = 16  # OpenAI's default of this endpoint


async def completions(request: Request) -> ASGIApp:
    context = ServerContext.of(request)
    body = await read_struct(request, CompletionRequest)
    model = context.check_model(body.model)
    body.check()
    num_logprobs = _num_logprobs(body)
    identity = context.identity("cmpl")
    requests = await _text_requests(context, body, model, num_logprobs, identity.id)
    answer = Answer(context.pipeline, context.metrics, requests, requests[0].params.n)
    choices = Choices(context, body, answer, num_logprobs)
    if body.stream:
        if body.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs is not available in a stream; use echo", param="prompt_logprobs")
        frame = ChunkFrame(identity, "text_completion", usage=body.include_usage)
        return EventStream(stream_chunks(answer, frame, choices.encode, body))
    return await until_disconnect(request.receive, _whole(answer, identity, body, choices))


def _num_logprobs(body: CompletionRequest) -> int | None:
    logprobs = whole("logprobs", body.logprobs)
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {logprobs}", param="logprobs"
        )
    return logprobs


async def _text_requests(
    context: ServerContext, body: CompletionRequest, model: ModelInfo, num_logprobs: int | None, request_id: str
) -> list[TextRequest]:
    """One request per prompt, each validated before any of them starts."""
    prompts = body.prompts()
    params = body.sampling_params(
        context.pipeline.tokenizer.default_sampling, max_tokens=body.max_tokens, logprobs=num_logprobs
    )
    params.validate(model.vocab_size)
    limit = context.config.max_prompts_per_request
    if len(prompts) * params.n > limit:
        raise InvalidRequestError(
            f"at most {limit} choices per request (prompts x n), got {len(prompts)} x {params.n}", param="prompt"
        )
    if body.echo and num_logprobs is not None:
        params.prompt_logprobs = max(num_logprobs, params.prompt_logprobs or 0)
    requests = []
    for number, prompt in enumerate(prompts):
        token_ids = await _encode(context, prompt)
        request = TextRequest(
            prompt_token_ids=token_ids,
            params=_with_limit(params, len(token_ids), model),
            request_id=f"{request_id}-{number}",
            cache_salt=body.cache_salt or "",
        )
        context.pipeline.validate(request, model)
        requests.append(request)
    return requests


async def _encode(context: ServerContext, prompt: str | list[int]) -> list[int]:
    """A text prompt is the whole input, written as the model shall see it: it may hold control tokens."""
    if isinstance(prompt, list):
        return prompt
    return await context.pipeline.tokenizer.encode_async(prompt, allow_special=True)


def _with_limit(params: SamplingParams, num_prompt_tokens: int, model: ModelInfo) -> SamplingParams:
    """The default limit gives way to the context's end and to min_tokens; one that the client set does not."""
    if params.max_tokens is not None:
        return params
    room = max(1, model.max_model_len - num_prompt_tokens)
    return replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))


class Choices:
    """Turns deltas and finished choices into choices of the answer, with the prompt in front when it is echoed."""

    def __init__(
        self, context: ServerContext, body: CompletionRequest, answer: Answer, num_logprobs: int | None
    ) -> None:
        self._body = body
        self._answer = answer
        self._num_logprobs = num_logprobs
        self._plain = num_logprobs is None and not body.return_token_ids
        self._heads = [b""] * len(answer.progress)  # b"": no chunk yet
        self._builders = [CompletionLogprobsBuilder() for _ in answer.progress]
        self._echoes = [self._echo(context, request) for request in answer.requests]

    def encode(self, index: int, delta: TextDelta) -> bytes | None:
        """JSON of one choice of a chunk, or None when there is nothing to tell (its text is held back)."""
        head = self._heads[index]
        if head and self._plain and delta.finish_reason is None:
            if not delta.text:
                return None
            return b'%b%b,"logprobs":null,"finish_reason":null}' % (head, encode_json(delta.text))
        self._heads[index] = b'{"index":%d,"text":' % index
        collected = Collected()
        collected.add(delta)
        choice = self._choice(index, collected, first=not head)
        return encode_json(choice)

    def whole(self, index: int, collected: Collected) -> CompletionChoice:
        choice = self._choice(index, collected, first=True)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(collected.prompt_logprobs)
        return choice

    def _choice(self, index: int, collected: Collected, *, first: bool) -> CompletionChoice:
        echo = self._echoes[index // self._answer.n] if first else ""
        choice = CompletionChoice(index=index, text=echo + collected.text, finish_reason=collected.finish_reason)
        if self._num_logprobs is not None:
            tokens = [*collected.prompt_logprobs, *collected.logprobs] if self._body.echo else collected.logprobs
            choice.logprobs = self._builders[index].build(tokens, self._num_logprobs)
        if self._body.return_token_ids:
            choice.token_ids = collected.token_ids
            choice.prompt_token_ids = self._prompt_ids(index) if first else UNSET
        if collected.finish_reason is not None:
            choice.stop_reason = collected.stop_reason
        return choice

    def _prompt_ids(self, index: int) -> list[int]:
        return self._answer.requests[index // self._answer.n].prompt_token_ids

    def _echo(self, context: ServerContext, request: TextRequest) -> str:
        return context.pipeline.tokenizer.decode(request.prompt_token_ids) if self._body.echo else ""


async def _whole(answer: Answer, identity: Identity, body: CompletionRequest, choices: Choices) -> Response:
    collected = await answer.collect()
    result = CompletionAnswer(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[choices.whole(index, choice) for index, choice in enumerate(collected)],
        usage=answer.usage(),
    )
    if body.return_metadata:
        result.llmserve = answer.handoff()
    return json_response(encode_json(result))
