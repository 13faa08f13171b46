"""Text in, text out, over any Backend: the one path of the HTTP server and of the embedded engine."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmserve.control.backend import Backend, RequestStream
from llmserve.control.messages import GenerateRequest, ModelInfo, TokenLogprob, TokenOutput
from llmserve.errors import InvalidRequestError, LlmserveError, UnavailableError, error_from_status
from llmserve.sampling_params import SamplingParams
from llmserve.text.chat_template import ChatTemplate
from llmserve.text.detokenizer import IncrementalDetokenizer, token_text
from llmserve.text.stop import StopMatcher
from llmserve.text.tokenizer import Tokenizer

LARGE_CHAT_MESSAGES = 64  # conversations from here on are rendered in a thread


@dataclass(slots=True)
class TextRequest:
    """One prompt with `params.n` choices."""

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    cache_salt: str = ""


@dataclass(slots=True)
class TextLogprob:
    """A token with its raw log-probability. `bytes` are its true bytes, `token` their text."""

    token: str
    bytes: bytes
    token_id: int
    logprob: float | None
    top: list[TextLogprob] = field(default_factory=list)


@dataclass(slots=True)
class TextDelta:
    """What is new in one choice. `text` never holds part of a stop string; the last delta has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TextLogprob] | None = None
    prompt_logprobs: list[TextLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0  # so far
    num_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    transferred_bytes: int = 0


@dataclass(slots=True)
class CompletedChoice:
    """A finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] | None = None
    prompt_logprobs: list[TextLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    transferred_bytes: int = 0

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_prompt_tokens = delta.num_prompt_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.prefill_worker = self.prefill_worker or delta.prefill_worker
        self.decode_worker = self.decode_worker or delta.decode_worker
        self.transferred_bytes += delta.transferred_bytes


class TextPipeline:
    """Renders and tokenises prompts, fans a request out into sequences, and turns their tokens into text."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, *, escape_special_tokens: bool = True) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.escape_special_tokens = escape_special_tokens
        self.template = ChatTemplate(tokenizer)

    def tokenize_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation (see ChatTemplate.tokenize). Raises InvalidRequestError."""
        return self.template.tokenize(messages, escape_special_tokens=self.escape_special_tokens, **options)

    async def tokenize_chat_async(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The same; a long conversation is rendered and encoded in a thread, so that the event loop goes on."""
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size < 20_000 and len(messages) < LARGE_CHAT_MESSAGES:
            return self.tokenize_chat(messages, **options)
        return await asyncio.to_thread(self.tokenize_chat, messages, **options)

    def validate(self, request: TextRequest, model: ModelInfo) -> None:
        """Everything that can be refused before anything is started. Raises InvalidRequestError naming the field."""
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise InvalidRequestError("the prompt must have at least one token", param="prompt")
        if not (min(prompt) >= 0 and max(prompt) < model.vocab_size):
            raise InvalidRequestError(f"prompt token ids must be between 0 and {model.vocab_size - 1}", param="prompt")
        params.validate(model.vocab_size)
        room = model.max_model_len - len(prompt)
        wanted = params.max_tokens if params.max_tokens is not None else 1
        if wanted > room:
            asked = f"max_tokens asks for {wanted}" if params.max_tokens is not None else "one must be generated"
            raise InvalidRequestError(
                f"this model's maximum context length is {model.max_model_len} tokens; the prompt has {len(prompt)} "
                f"and {asked}",
                param="prompt" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > room:
            raise InvalidRequestError(f"min_tokens must be at most {room} after this prompt", param="min_tokens")

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        """Deltas of all choices as they come.

        Closing the iterator aborts what still runs. Raises the LlmserveError of the first choice that fails, after
        aborting its siblings.
        """
        model = self.backend.model
        if model is None:
            raise UnavailableError("no worker has registered yet")
        self.validate(request, model)
        choices = [self._start(request, index) for index in range(request.params.n)]
        try:
            if len(choices) == 1:
                async for delta in choices[0].deltas():
                    yield delta
            else:
                async for delta in _merge(choices):
                    yield delta
        finally:
            for choice in choices:
                choice.stream.abort()

    async def generate_all(self, request: TextRequest) -> list[CompletedChoice]:
        """All choices, when every one has finished."""
        finished = [CompletedChoice(index) for index in range(request.params.n)]
        async for delta in self.generate(request):
            finished[delta.index].add(delta)
        return finished

    def _start(self, request: TextRequest, index: int) -> _Choice:
        params = msgspec.structs.replace(
            request.params, n=1, stop=[], seed=choice_seed(request.params.seed, index)
        )  # stop strings are text: the engine knows tokens only
        stream = self.backend.submit(
            GenerateRequest(
                request_id=f"{request.request_id}-{index}",
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                cache_salt=request.cache_salt,
            )
        )
        return _Choice(index, stream, request, self.tokenizer)


def choice_seed(seed: int | None, index: int) -> int:
    """Choice 0 has the request's seed itself, the others seeds derived from it; without one, each a random one."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1


class _Choice:
    """One sequence: its tokens become text, its stop strings end it."""

    def __init__(self, index: int, stream: RequestStream, request: TextRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self.index = index
        self.stream = stream
        self.tokenizer = tokenizer
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_generated = 0
        self.min_tokens = params.min_tokens
        self.detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.matcher = StopMatcher(params.stop, include_match=params.include_stop_str_in_output)
        self.waiting_ids: list[int] = []  # tokens whose text is held back
        self.waiting_logprobs: list[TextLogprob] = []

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        async for output in self.stream:
            delta = self._delta(output)
            if delta is not None:
                yield delta
                if delta.finish_reason is not None:
                    return

    def _delta(self, output: TokenOutput) -> TextDelta | None:
        if output.error is not None:
            error = output.error
            raise error_from_status(error.status, error.message, param=error.param, code=error.code)
        text, matched, used = self._text(output)
        self.waiting_ids += output.token_ids[:used]
        if output.logprobs:
            self.waiting_logprobs += [self._logprob(entry) for entry in output.logprobs[:used]]
        ended = matched is not None or output.finish_reason is not None
        if not text and not ended and output.prompt_logprobs is None and self.num_generated > len(self.waiting_ids):
            return None  # held back: its tokens travel with the text they belong to
        delta = TextDelta(
            index=self.index,
            text=text,
            token_ids=self.waiting_ids,
            logprobs=self.waiting_logprobs if self.waiting_logprobs else None,
            finish_reason="stop" if matched is not None else output.finish_reason,
            stop_reason=matched if matched is not None else output.stop_token_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated,
            num_cached_tokens=output.num_cached_tokens,
            prefill_worker=output.prefill_worker,
            decode_worker=output.decode_worker,
            transferred_bytes=output.transferred_bytes,
        )
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = [self._logprob(entry) for entry in output.prompt_logprobs]
        self.waiting_ids, self.waiting_logprobs = [], []
        return delta

    def _text(self, output: TokenOutput) -> tuple[str, str | None, int]:
        """New text that may be sent, the stop string that ended it, and how many of the output's tokens count.

        Tokens are fed one by one: what comes after the token that completes a stop string does not count.
        """
        parts: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            self.num_generated += 1
            if position == len(output.token_ids) - 1 and token_id == output.stop_token_id:
                continue  # the token that ended the sequence is not part of its text
            text = self.detokenizer.add([token_id])
            if self.num_generated <= self.min_tokens:
                parts.append(text)  # too early to stop: no stop string may begin here
                continue
            result = self.matcher.add(text)
            parts.append(result.text)
            if result.matched is not None:
                return "".join(parts), result.matched, position + 1
        if output.finish_reason is not None:
            result = self.matcher.add(self.detokenizer.finish())
            parts += [result.text, self.matcher.flush()]
            if result.matched is not None:
                return "".join(parts), result.matched, len(output.token_ids)
        return "".join(parts), None, len(output.token_ids)

    def _logprob(self, entry: TokenLogprob) -> TextLogprob:
        text, data = token_text(self.tokenizer, entry.token_id)
        top = [TextLogprob(*token_text(self.tokenizer, i), token_id=i, logprob=value) for i, value in entry.top]
        return TextLogprob(text, data, entry.token_id, entry.logprob, top)


async def _merge(choices: list[_Choice]) -> AsyncGenerator[TextDelta, None]:
    """Deltas of several choices in the order of their arrival; the first error ends all."""
    queue: asyncio.Queue[TextDelta | LlmserveError | Exception | None] = asyncio.Queue(maxsize=2 * len(choices))

    async def pump(choice: _Choice) -> None:
        end: Exception | None = None
        try:
            async for delta in choice.deltas():
                await queue.put(delta)
        except Exception as error:
            end = error
        await queue.put(end)

    pumps = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
