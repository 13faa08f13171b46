"""The sequences of one HTTP request: run together, counted once for usage and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from llmserve.pipeline import TextDelta, TextLogprob, TextPipeline, TextRequest
from llmserve.server.metrics import ServerMetrics
from llmserve.server.responses import Handoff, PromptTokensDetails, Usage

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """How far one sequence is."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    transferred_bytes: int = 0

    def update(self, delta: TextDelta) -> None:
        self.prompt_tokens = delta.num_prompt_tokens
        self.generated_tokens = delta.num_generated_tokens
        self.cached_tokens = max(self.cached_tokens, delta.num_cached_tokens)
        self.transferred_bytes = max(self.transferred_bytes, delta.transferred_bytes)
        self.prefill_worker = delta.prefill_worker or self.prefill_worker
        self.decode_worker = delta.decode_worker or self.decode_worker

    def handoff(self) -> Handoff:
        return Handoff(
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            transferred_bytes=self.transferred_bytes,
        )


@dataclass(slots=True)
class Collected:
    """A finished choice of an answer that is sent whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs += delta.prompt_logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class Answer:
    """One request of one or more prompts with `n` choices each; choice `c` of prompt `p` has index `p * n + c`."""

    def __init__(
        self, pipeline: TextPipeline, metrics: ServerMetrics, requests: Sequence[TextRequest], n: int = 1
    ) -> None:
        self.requests = requests
        self.n = n
        self.progress = [Progress() for _ in range(len(requests) * n)]
        self._pipeline = pipeline
        self._metrics = metrics

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """(index, delta) of all choices as they come. Closing it aborts what still runs.

        Raises the LlmserveError of the first sequence that fails, after aborting the others.
        """
        started = time.perf_counter()
        outcome = "abort"
        try:
            async with aclosing(merge([self._pipeline.generate(request) for request in self.requests])) as merged:
                async for prompt, delta in merged:
                    index = prompt * self.n + delta.index
                    self._observe(self.progress[index], delta, started)
                    yield index, delta
        except Exception:
            outcome = "error"
            raise
        finally:
            for progress in self.progress:
                if not progress.finished:
                    self._metrics.count_finished(outcome)

    async def collect(self) -> list[Collected]:
        """All choices, once every one has finished."""
        choices = [Collected() for _ in self.progress]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        return choices

    def usage(self) -> Usage:
        """Prompt tokens count once per prompt, whatever n is."""
        firsts = self.progress[:: self.n]
        return _usage(firsts, sum(progress.generated_tokens for progress in self.progress))

    def usage_of(self, index: int) -> Usage:
        """The usage so far of one choice."""
        return _usage([self.progress[index]], self.progress[index].generated_tokens)

    def handoff(self) -> Handoff:
        """Workers of the first choice, bytes of all."""
        handoff = self.progress[0].handoff()
        handoff.transferred_bytes = sum(progress.transferred_bytes for progress in self.progress)
        return handoff

    def _observe(self, progress: Progress, delta: TextDelta, started: float) -> None:
        metrics = self._metrics
        new_tokens = delta.num_generated_tokens - progress.generated_tokens
        progress.update(delta)
        if new_tokens > 0:
            now = time.perf_counter()
            if progress.first_token_s == 0.0:
                progress.first_token_s = now
                metrics.time_to_first_token.observe(now - started)
            else:
                metrics.inter_token_latency.observe((now - progress.last_token_s) / new_tokens)
            progress.last_token_s = now
            metrics.generation_tokens += new_tokens
        if delta.finish_reason is not None and not progress.finished:
            progress.finished = True
            metrics.prompt_tokens += progress.prompt_tokens
            metrics.count_finished(delta.finish_reason)
            metrics.request_latency.observe(time.perf_counter() - started)
            if progress.generated_tokens > 1:
                span_s = progress.last_token_s - progress.first_token_s
                metrics.time_per_output_token.observe(span_s / (progress.generated_tokens - 1))


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, with the number of their source. A slow consumer slows all sources."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:  # type: ignore[type-var]
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(number, source, queue)) for number, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, source: AsyncIterator[T], queue: asyncio.Queue[tuple[int, T] | Exception | None]) -> None:
    end: Exception | None = None
    try:
        async with aclosing(source) as items:  # type: ignore[type-var]
            async for item in items:
                await queue.put((number, item))
    except Exception as error:
        end = error
    await queue.put(end)


def _usage(firsts: Sequence[Progress], generated_tokens: int) -> Usage:
    prompt_tokens = sum(progress.prompt_tokens for progress in firsts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=generated_tokens,
        total_tokens=prompt_tokens + generated_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(progress.cached_tokens for progress in firsts)),
    )
