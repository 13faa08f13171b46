"""Text in, text out, over any Backend: the one path of the HTTP server and of the embedded engine."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmserve.control.backend import Backend, RequestStream
from llmserve.control.messages import GenerateRequest, ModelInfo, TokenLogprob, TokenOutput
from llmserve.errors import InvalidRequestError, LlmserveError, UnavailableError, error_from_status
from llmserve.sampling_params import SamplingParams
from llmserve.text.chat_template import ChatTemplate
from llmserve.text.detokenizer import IncrementalDetokenizer, token_text
from llmserve.text.stop import StopMatcher, StopStrings
from llmserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextRequest:
    """One prompt with `params.n` choices."""

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    cache_salt: str = ""


@dataclass(slots=True)
class TextLogprob:
    """A token with its raw log-probability: `token` is its text, `bytes` what it adds to the answer's text.

    The bytes of an answer's tokens add up to its text: they are b"" for a token that is left out of it, as the one that
    ended the sequence is. (A stop string that is cut off is still among its tokens.)
    """

    token: str
    bytes: bytes
    token_id: int
    logprob: float | None
    top: list[TextLogprob] = field(default_factory=list)


@dataclass(slots=True)
class TextDelta:
    """What is new in one choice. `text` never holds part of a stop string; the last delta has a finish_reason.

    token_ids, logprobs: tokens whose text is sent by now; those of text that is held back come with that text.
    prompt_logprobs: once, when asked for. All other numbers and names: as known so far.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TextLogprob] | None = None
    prompt_logprobs: list[TextLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the EOS or stop token
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
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
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    transferred_bytes: int = 0

    @classmethod
    def of(cls, deltas: list[TextDelta]) -> CompletedChoice:
        """All deltas of one choice, in their order."""
        last = deltas[-1]
        return cls(
            index=last.index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            logprobs=None if last.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()],
            prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_prompt_tokens=last.num_prompt_tokens,
            num_generated_tokens=last.num_generated_tokens,
            num_cached_tokens=last.num_cached_tokens,
            prefill_worker=last.prefill_worker,
            decode_worker=last.decode_worker,
            transferred_bytes=last.transferred_bytes,
        )


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
        """The same; a long conversation is handled in a thread, so that the event loop goes on."""
        return await self.template.tokenize_async(messages, escape_special_tokens=self.escape_special_tokens, **options)

    def validate(self, request: TextRequest, model: ModelInfo) -> None:
        """Everything that can be refused before anything is started. Raises InvalidRequestError naming the field."""
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise InvalidRequestError("the prompt must have at least one token", param="prompt")
        if min(prompt) < 0 or max(prompt) >= model.vocab_size:
            wrong = next(token_id for token_id in prompt if not 0 <= token_id < model.vocab_size)
            raise InvalidRequestError(
                f"prompt: token ids must be between 0 and {model.vocab_size - 1}, got {wrong}", param="prompt"
            )
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
            raise InvalidRequestError(
                f"min_tokens must be at most {room} after this prompt, got {params.min_tokens}", param="min_tokens"
            )

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        """Deltas of all choices as they come.

        Closing the iterator aborts what still runs. Raises the LlmserveError of the first choice that fails, after
        aborting its siblings.
        """
        model = self.backend.model
        if model is None:
            raise UnavailableError("no worker has registered yet")
        self.validate(request, model)
        stops = StopStrings(request.params.stop)
        choices: list[_Choice] = []
        try:
            for index in range(request.params.n):
                choices.append(_Choice(index, self._submit(request, index), request, self.tokenizer, stops))
            async with aclosing(choices[0].deltas() if len(choices) == 1 else _merge(choices)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for choice in choices:
                choice.stream.abort()

    async def generate_all(self, request: TextRequest) -> list[CompletedChoice]:
        """All choices, when every one has finished. Raises as `generate` does."""
        collected: list[list[TextDelta]] = [[] for _ in range(request.params.n)]
        async with aclosing(self.generate(request)) as deltas:
            async for delta in deltas:
                collected[delta.index].append(delta)
        return [CompletedChoice.of(each) for each in collected]

    def _submit(self, request: TextRequest, index: int) -> RequestStream:
        params = msgspec.structs.replace(
            request.params, n=1, stop=[], seed=choice_seed(request.params.seed, index)
        )  # stop strings are text: the engine knows tokens only
        return self.backend.submit(
            GenerateRequest(
                request_id=f"{request.request_id}-{index}",
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                cache_salt=request.cache_salt,
            )
        )


def choice_seed(seed: int | None, index: int) -> int:
    """Choice 0 has the request's seed itself, the others seeds derived from it; without one, each a random one."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1


@dataclass(slots=True)
class _Held:
    """A token that waits for its text to be sent: all of it is once `end` characters are."""

    end: int
    token_id: int
    logprob: TextLogprob | None


class _Choice:
    """One sequence: its tokens become text, its stop strings end it."""

    def __init__(
        self, index: int, stream: RequestStream, request: TextRequest, tokenizer: Tokenizer, stops: StopStrings
    ) -> None:
        params = request.params
        self.stream = stream
        self._index = index
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(stops, include_match=params.include_stop_str_in_output)
        self._held: deque[_Held] = deque()
        self._num_chars = 0  # characters of text so far
        self._num_sent_chars = 0
        self._told_first = False
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_generated = 0
        self._num_cached = 0
        self._transferred_bytes = 0
        self._prefill_worker = ""
        self._decode_worker = ""

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        async for output in self.stream:
            delta = self._delta(output)
            if delta is not None:
                yield delta
                if delta.finish_reason is not None:
                    return
        raise LlmserveError("the engine ended a sequence without a reason; the answer is incomplete")

    def _delta(self, output: TokenOutput) -> TextDelta | None:
        """What this output adds; None when all of it is held back."""
        if output.error is not None:
            error = output.error
            raise error_from_status(error.status, error.message, param=error.param, code=error.code)
        self._note(output)
        text, matched = self._text(output)
        if matched is not None:
            self.stream.abort()  # the text has ended, the sequence has not: free its pages now
        self._num_sent_chars += len(text)
        ended = matched is not None or output.finish_reason is not None
        released = self._release(everything=ended)
        # The first token is told at once even when its text is held: it ends the wait that users see.
        is_first = bool(output.token_ids) and not self._told_first
        if not (text or released or ended or is_first or output.prompt_logprobs is not None):
            return None
        self._told_first = self._told_first or is_first
        return TextDelta(
            index=self._index,
            text=text,
            token_ids=[held.token_id for held in released],
            logprobs=None if self._params.logprobs is None else [held.logprob for held in released if held.logprob],
            prompt_logprobs=self._prompt_logprobs(output),
            finish_reason=output.finish_reason if matched is None else "stop",
            stop_reason=output.stop_token_id if matched is None else matched,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated,
            num_cached_tokens=self._num_cached,
            prefill_worker=self._prefill_worker,
            decode_worker=self._decode_worker,
            transferred_bytes=self._transferred_bytes,
        )

    def _note(self, output: TokenOutput) -> None:
        """Remember what only some outputs say."""
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        self._transferred_bytes = max(self._transferred_bytes, output.transferred_bytes)
        self._prefill_worker = output.prefill_worker or self._prefill_worker
        self._decode_worker = output.decode_worker or self._decode_worker

    def _text(self, output: TokenOutput) -> tuple[str, str | None]:
        """New text that may be sent, and the stop string that ended it.

        Tokens are read one by one: what comes after the token that completes a stop string does not count.
        """
        parts: list[str] = []
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            ends_sequence = position == last and token_id == output.stop_token_id
            logprob = output.logprobs[position] if output.logprobs else None
            text = self._token(token_id, logprob, cut=ends_sequence and not self._params.include_stop_str_in_output)
            result = self._matcher.add(text, may_stop=self._may_stop)
            parts.append(result.text)
            if result.matched is not None:
                return "".join(parts), result.matched
        if output.finish_reason is not None:
            text = self._detokenizer.finish()
            self._num_chars += len(text)
            result = self._matcher.add(text, may_stop=self._may_stop)
            parts += [result.text, self._matcher.flush()]
            return "".join(parts), result.matched
        return "".join(parts), None

    @property
    def _may_stop(self) -> bool:
        return self._num_generated > self._params.min_tokens

    def _token(self, token_id: int, logprob: TokenLogprob | None, *, cut: bool) -> str:
        """The text that one more token makes final; the token itself waits until its text is sent."""
        self._num_generated += 1
        has_text = not cut and not self._detokenizer.skips(token_id)
        text = self._detokenizer.add(token_id) if has_text else ""
        self._num_chars += len(text)
        entry = self._logprob(logprob) if logprob is not None else None
        if entry is not None and not has_text:
            entry.bytes = b""
        end = self._num_chars + self._detokenizer.mid_character  # a character that is not complete yet counts
        self._held.append(_Held(end, token_id, entry))
        return text

    def _release(self, *, everything: bool) -> list[_Held]:
        """The tokens whose text is sent by now."""
        held, released = self._held, []
        while held and (everything or held[0].end <= self._num_sent_chars):
            released.append(held.popleft())
        return released

    def _prompt_logprobs(self, output: TokenOutput) -> list[TextLogprob] | None:
        if output.prompt_logprobs is None:
            return None
        return [self._logprob(entry) for entry in output.prompt_logprobs]

    def _logprob(self, entry: TokenLogprob) -> TextLogprob:
        text, data = token_text(self._tokenizer, entry.token_id)
        top = [TextLogprob(*token_text(self._tokenizer, i), token_id=i, logprob=value) for i, value in entry.top]
        return TextLogprob(text, data, entry.token_id, entry.logprob, top)


async def _merge(choices: list[_Choice]) -> AsyncGenerator[TextDelta, None]:
    """Deltas of several choices in the order of their arrival; the first error ends all."""
    queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(maxsize=2 * len(choices))

    async def pump(choice: _Choice) -> None:
        end: Exception | None = None
        try:
            async with aclosing(choice.deltas()) as deltas:
                async for delta in deltas:
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
