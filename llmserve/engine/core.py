"""The engine without processes: add and abort sequences, plan a step, execute it, collect the outputs.

All methods but `execute` belong to one thread (the event loop of the worker); `execute` may run in another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from llmserve.control.messages import ErrorInfo, GenerateRequest, ModelInfo, TokenOutput, WorkerLoad
from llmserve.engine.model_runner import StepResult
from llmserve.engine.page_pool import PagePool, PageState
from llmserve.engine.scheduler import Handoff, ScheduledSequence, Scheduler, StepPlan
from llmserve.engine.sequence import Sequence, SequenceStatus, sequence_for_generate, sequence_for_prefill
from llmserve.errors import InvalidRequestError, LlmserveError, OverloadedError


class Runner(Protocol):
    """Executes a plan: the ModelRunner, or a stand-in with a fixed time in benchmarks."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(slots=True)
class CoreLimits:
    max_batch: int
    max_batch_tokens: int
    max_waiting: int
    max_queue_s: float = 120.0  # a sequence that gets no pages for so long is refused


@dataclass(slots=True)
class CoreCounters:
    """Monotonic, for /metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    nan_rows: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """Scheduler, page pool and runner of one worker."""

    def __init__(self, model: ModelInfo, pool: PagePool, runner: Runner, limits: CoreLimits) -> None:
        self.model = model
        self.pool = pool
        self.runner = runner
        self.limits = limits
        self.scheduler = Scheduler(pool, max_batch=limits.max_batch, max_batch_tokens=limits.max_batch_tokens)
        self.sequences: dict[str, Sequence] = {}
        self.counters = CoreCounters()
        self.on_prefilled: Callable[[Sequence], None] | None = None  # prefiller: computed to its end, pages still held
        self.last_progress_s = time.monotonic()
        self._executing: set[Sequence] = set()
        self._outbox: list[TokenOutput] = []  # outputs that no step produced: refusals, failed hand-offs

    # ------------------------------------------------------------------ requests

    def add(self, request: GenerateRequest) -> None:
        """Queue a sequence. Raises InvalidRequestError or OverloadedError; then nothing was kept."""
        self._check_new(request.request_id, request.prompt_token_ids)
        request.params.validate(self.model.vocab_size)
        if len(request.prompt_token_ids) >= self.model.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens; the model's context of "
                f"{self.model.max_model_len} must also hold at least one generated token",
                param="prompt",
                code="context_length_exceeded",
            )
        self._queue(sequence_for_generate(request, self.model.eos_token_ids))

    def add_prefill(self, request_id: str, token_ids: list[int], cache_salt: str) -> Sequence:
        """Queue a prompt that is computed and never sampled (prefiller). Raises as `add`."""
        self._check_new(request_id, token_ids)
        if len(token_ids) >= self.model.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids) + 1} tokens; the prefiller's limit is {self.model.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        sequence = sequence_for_prefill(request_id, token_ids, cache_salt)
        self._queue(sequence)
        return sequence

    def finish_prefill(self, request_id: str) -> None:
        """The pages of a held sequence are sent: free them."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self._count_finish("prefilled")
            self.scheduler.finish(sequence)

    def abort(self, request_id: str) -> None:
        """End a sequence without output; its pages are free at once, or at the end of the step that uses them."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return
        sequence.aborted = True
        self._count_finish("abort")
        if sequence in self._executing or sequence.status is SequenceStatus.AWAITING_KV:
            return  # ended by `complete`, or by the hand-off that owns its pages
        self.scheduler.finish(sequence)

    def _check_new(self, request_id: str, token_ids: list[int]) -> None:
        if request_id in self.sequences:
            raise InvalidRequestError(f"request id {request_id!r} is already in use", param="request_id")
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if not (min(token_ids) >= 0 and max(token_ids) < self.model.vocab_size):
            raise InvalidRequestError(f"prompt token ids must be below {self.model.vocab_size}", param="prompt")
        if len(self.scheduler.waiting) >= self.limits.max_waiting:
            raise OverloadedError(f"{len(self.scheduler.waiting)} sequences are waiting; the limit is reached")

    def _queue(self, sequence: Sequence) -> None:
        if not self.has_work():
            self.last_progress_s = time.monotonic()
        self.sequences[sequence.request_id] = sequence
        self.scheduler.add(sequence)

    # ------------------------------------------------------------------ one step

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def schedule(self) -> tuple[StepPlan, list[Handoff]]:
        self._expire()
        plan, handoffs = self.scheduler.schedule()
        self._executing = {item.sequence for item in plan.items}
        return plan, handoffs

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def complete(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Book a finished step; returns what it produced, plus refusals that had no step of their own."""
        self._executing = set()
        self.counters.steps += 1
        self.last_progress_s = time.monotonic()
        outputs = self.take_outbox()
        for item in plan.items:
            sequence = item.sequence
            self._count_tokens(item)
            self.scheduler.advance(item)
            if sequence.aborted:
                self.scheduler.finish(sequence)
                continue
            if sequence in result.prompt_logprobs and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += result.prompt_logprobs[sequence]
            if item.sample:
                outputs.append(self._accept(sequence, result))
            elif sequence.prefill_only and sequence.num_uncomputed == 0:
                self.scheduler.hold(sequence)
                if self.on_prefilled is not None:
                    self.on_prefilled(sequence)
        return outputs

    def step_failed(self, plan: StepPlan, error: Exception) -> list[TokenOutput]:
        """The runner raised: only the sequences of that step fail, with the reason."""
        self._executing = set()
        self.last_progress_s = time.monotonic()
        outputs = self.take_outbox()
        info = ErrorInfo(status=500, message=f"model step failed: {error}", code="step_failed")
        for item in plan.items:
            self.scheduler.finish(item.sequence)
            if not item.sequence.aborted:
                outputs.append(self._fail(item.sequence, info))
        return outputs

    def take_outbox(self) -> list[TokenOutput]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def _accept(self, sequence: Sequence, result: StepResult) -> TokenOutput:
        drawn = result.sampled[sequence]
        if drawn.error is not None:
            self.counters.nan_rows += 1
            self.scheduler.finish(sequence)
            return self._fail(sequence, ErrorInfo(status=500, message=drawn.error, code="invalid_logits"))
        output = TokenOutput(request_id=sequence.request_id, token_ids=[drawn.token_id])
        if drawn.logprob is not None:
            output.logprobs = [drawn.logprob]
        if sequence.num_output_tokens == 0:
            output.prompt_logprobs = sequence.prompt_logprobs
            output.num_cached_tokens = sequence.num_cached_tokens
            output.prefill_worker = sequence.prefill_worker
            output.transferred_bytes = sequence.transferred_bytes
            sequence.prompt_logprobs = None
        sequence.append(drawn.token_id)
        self.counters.generated_tokens += 1
        output.finish_reason, output.stop_token_id = self._finish_reason(sequence, drawn.token_id)
        if output.finish_reason is not None:
            del self.sequences[sequence.request_id]
            self._count_finish(output.finish_reason)
            self.scheduler.finish(sequence)
        return output

    def _finish_reason(self, sequence: Sequence, token_id: int) -> tuple[str | None, int | None]:
        params, generated = sequence.params, sequence.num_output_tokens
        stops = token_id in params.stop_token_ids or (token_id in self.model.eos_token_ids and not params.ignore_eos)
        if stops and generated >= params.min_tokens:
            return "stop", token_id
        if params.max_tokens is not None and generated >= params.max_tokens:
            return "length", None
        if sequence.num_tokens >= self.model.max_model_len:
            return "length", None
        return None, None

    # ------------------------------------------------------------------ hand-off (decoder)

    def kv_arrived(self, handoff: Handoff, prefill_worker: str, transferred_bytes: int) -> None:
        sequence = handoff.sequence
        sequence.prefill_worker = prefill_worker
        sequence.transferred_bytes += transferred_bytes
        self.scheduler.kv_arrived(sequence, handoff.end_token)

    def kv_failed(self, handoff: Handoff, *, drained: bool, error: ErrorInfo | None) -> list[int]:
        """Recompute here (error None), or fail the sequence. Returns the quarantined pages."""
        sequence = handoff.sequence
        if sequence.aborted:
            return self.scheduler.kv_abandoned(sequence, drained=drained)
        if error is None:
            return self.scheduler.kv_failed(sequence, drained=drained)
        quarantined = self.scheduler.kv_abandoned(sequence, drained=drained)
        self._outbox.append(self._fail(sequence, error))
        return quarantined

    def release_quarantine(self, pages: list[int]) -> None:
        self.pool.release_quarantine(pages)

    # ------------------------------------------------------------------ state for others

    def load(self) -> WorkerLoad:
        counts = self.pool.counts()
        busy = self.has_work()
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.awaiting),
            queued_tokens=self.scheduler.queued_tokens(),
            free_pages=counts[PageState.FREE],
            total_pages=self.pool.num_pages,
            cached_pages=counts[PageState.CACHED],
            quarantined_pages=counts[PageState.QUARANTINED],
            steps=self.counters.steps,
            stalled_s=time.monotonic() - self.last_progress_s if busy else 0.0,
            counters=self._counter_values(),
        )

    def _counter_values(self) -> dict[str, float]:
        return {
            "prompt_tokens": self.counters.prompt_tokens,
            "generation_tokens": self.counters.generated_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "prefix_cache_queries": self.pool.queried_tokens,
            "prefix_cache_hits": self.pool.hit_tokens,
            "invalid_logits_rows": self.counters.nan_rows,
        }

    def _expire(self) -> None:
        """Refuse a sequence that has waited too long for pages: no wait is without end."""
        oldest = time.monotonic() - self.limits.max_queue_s
        while self.scheduler.waiting and self.scheduler.waiting[0].arrival_s < oldest:
            sequence = self.scheduler.waiting[0]
            if sequence.admitted_once:
                return  # preempted: it has its turn as soon as pages are free
            self.scheduler.finish(sequence)
            error = OverloadedError(f"no KV pages became free within {self.limits.max_queue_s:g} s")
            self._outbox.append(self._fail(sequence, error_info(error)))

    def _fail(self, sequence: Sequence, error: ErrorInfo) -> TokenOutput:
        self.sequences.pop(sequence.request_id, None)
        self._count_finish("error")
        return TokenOutput(request_id=sequence.request_id, finish_reason="error", error=error)

    def _count_tokens(self, item: ScheduledSequence) -> None:
        prompt_end = min(item.start + item.count, item.sequence.num_prompt_tokens)
        self.counters.prompt_tokens += max(0, prompt_end - item.start)

    def _count_finish(self, reason: str) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1


def error_info(error: LlmserveError) -> ErrorInfo:
    """An error as it travels between processes."""
    return ErrorInfo(status=error.status, message=error.message, param=error.param, code=error.code)
