"""What runs in the next step: continuous batching with chunked prefill over a paged cache.

The scheduler is plain state and no tensors: `schedule()` turns the state into a StepPlan, `advance()` books what the
step did. It serves all roles. A unified worker computes prompts in chunks beside its decodes; a prefiller holds only
sequences that are computed and never sampled; a decoder reserves pages and lets a prefiller fill them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llmserve.engine.page_pool import PagePool, PageState
from llmserve.engine.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens [start, start + count) of a sequence are computed in this step; `sample` draws the next one."""

    sequence: Sequence
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    items: list[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)

    @property
    def is_decode(self) -> bool:
        """Every sequence draws a token and computes no more than one."""
        return all(item.count == 1 and item.sample for item in self.items)


@dataclass(slots=True)
class Handoff:
    """A decoder's sequence whose prompt a prefiller shall compute: pages[i] takes tokens from first_token on."""

    sequence: Sequence
    first_token: int
    end_token: int  # exclusive: the last prompt token is left for the decoder
    pages: list[int]


class Scheduler:
    """State: `waiting` (first come, first served), `awaiting` (pages being filled by a prefiller), `running`."""

    def __init__(self, pool: PagePool, *, max_batch: int, max_batch_tokens: int) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.awaiting: dict[str, Sequence] = {}
        self.running: list[Sequence] = []  # in order of admission: the last is preempted first
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed here."""
        return sum(s.num_uncomputed for s in self.waiting) + sum(
            s.num_uncomputed for s in self.running if s.num_uncomputed > 1
        )

    # ------------------------------------------------------------------ one step

    def schedule(self) -> tuple[StepPlan, list[Handoff]]:
        """Choose the tokens of the next step within the token budget, and admit what fits.

        Decodes come first (each is one token), then prompts that were begun, then new ones. A running sequence that
        gets no page preempts the one admitted last.
        """
        planned: dict[Sequence, ScheduledSequence] = {}
        budget = self.max_batch_tokens
        decodes = [s for s in self.running if s.is_decoding]
        prompts = [s for s in self.running if not s.is_decoding]
        for sequence in decodes + prompts:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by an earlier one of this step
            count = min(sequence.num_uncomputed, budget)
            if count == 0:
                break
            if self._grow(sequence, sequence.num_computed + count, planned):
                planned[sequence] = self._plan(sequence, count)
                budget = self.max_batch_tokens - sum(item.count for item in planned.values())
        handoffs = self._admit(planned, budget)
        return StepPlan(list(planned.values())), handoffs

    def advance(self, item: ScheduledSequence) -> None:
        """Book that the tokens of `item` are computed; full pages become reusable by other sequences."""
        sequence = item.sequence
        sequence.num_computed = item.start + item.count
        self._commit(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over: take it out and free its pages at once (cached ones stay for others)."""
        self._remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.release_pages(sequence)

    def hold(self, sequence: Sequence) -> None:
        """A prefiller's sequence is computed: it needs no more steps, but its pages until they are sent."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.HELD

    def release_pages(self, sequence: Sequence) -> None:
        pages, sequence.pages = sequence.pages, []
        sequence.keys.num_committed = 0
        self.pool.free(pages)

    # ------------------------------------------------------------------ hand-off (decoder)

    def kv_arrived(self, sequence: Sequence, end_token: int) -> None:
        """A prefiller has filled the reserved pages: run the last prompt token as the first decode step."""
        del self.awaiting[sequence.request_id]
        self.pool.activate(sequence.pages)
        sequence.num_computed = end_token
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self._commit(sequence)

    def kv_failed(self, sequence: Sequence, *, drained: bool) -> list[int]:
        """The hand-off failed. Back to the queue, to be computed here; returns the pages put in quarantine.

        `drained`: the prefiller has confirmed that it writes no more, so the pages are free at once.
        """
        quarantined = self._withdraw(sequence, drained=drained)
        sequence.remote_prefill = False
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        return quarantined

    def kv_abandoned(self, sequence: Sequence, *, drained: bool) -> list[int]:
        """The sequence ends while a prefiller may still write its pages; returns the pages put in quarantine."""
        quarantined = self._withdraw(sequence, drained=drained)
        sequence.status = SequenceStatus.FINISHED
        return quarantined

    def _withdraw(self, sequence: Sequence, *, drained: bool) -> list[int]:
        del self.awaiting[sequence.request_id]
        pages, sequence.pages = sequence.pages, []
        sequence.num_computed = 0
        if drained:
            self.pool.free(pages)
            return []
        return self.pool.quarantine(pages)

    # ------------------------------------------------------------------ inside

    def _plan(self, sequence: Sequence, count: int) -> ScheduledSequence:
        end = sequence.num_computed + count
        sample = end == sequence.num_tokens and not sequence.prefill_only
        return ScheduledSequence(sequence, sequence.num_computed, count, sample)

    def _grow(self, sequence: Sequence, num_tokens: int, planned: dict[Sequence, ScheduledSequence]) -> bool:
        """Give the sequence pages for `num_tokens`; False if it had to be preempted itself."""
        missing = self.pool.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while (pages := self.pool.allocate(missing, PageState.IN_USE)) is None:
            victim = self.running[-1]
            planned.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += pages
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Free its pages and let it start again: prompt and output so far are computed anew (or found in the cache)."""
        self.running.remove(victim)
        self.release_pages(victim)
        victim.num_computed = 0
        victim.remote_prefill = self._may_be_remote(victim)
        victim.status = SequenceStatus.WAITING
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, planned: dict[Sequence, ScheduledSequence], budget: int) -> list[Handoff]:
        handoffs: list[Handoff] = []
        while self.waiting and len(self.running) + len(self.awaiting) < self.max_batch:
            sequence = self.waiting[0]
            if budget == 0 and not sequence.remote_prefill:
                break
            if not self._reserve(sequence):
                break  # first come, first served: nobody overtakes, so nobody starves
            self.waiting.popleft()
            if sequence.remote_prefill and sequence.num_uncomputed > 1:
                handoffs.append(self._hand_off(sequence))
                continue
            self.pool.activate(sequence.pages)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            count = min(sequence.num_uncomputed, budget)
            if count > 0:
                planned[sequence] = self._plan(sequence, count)
                budget -= count
        return handoffs

    def _reserve(self, sequence: Sequence) -> bool:
        """Take cached pages and reserve the rest for all tokens known now; False (and nothing taken) when short."""
        limit = sequence.num_tokens - 1  # the last token is always computed: something must be sampled from
        if sequence.prompt_logprobs is not None and sequence.num_output_tokens == 0:
            limit = 0  # every prompt position must be computed to know its log-probabilities
        cached = self.pool.match_prefix(sequence.token_ids, sequence.keys, max_tokens=limit)
        missing = self.pool.pages_for(sequence.num_tokens) - len(cached)
        pages = self.pool.allocate(missing, PageState.RESERVED)
        if pages is None:
            self.pool.free(cached)
            return False
        sequence.pages = cached + pages
        sequence.num_computed = len(cached) * self.pool.page_size
        if not sequence.admitted_once:
            sequence.admitted_once = True
            sequence.num_cached_tokens = sequence.num_computed
            self.pool.count_hit(queried=limit, hit=sequence.num_computed)
        return True

    def _hand_off(self, sequence: Sequence) -> Handoff:
        sequence.status = SequenceStatus.AWAITING_KV
        self.awaiting[sequence.request_id] = sequence
        first_page = sequence.num_computed // self.pool.page_size
        end_token = sequence.num_tokens - 1
        pages = sequence.pages[first_page : self.pool.pages_for(end_token)]
        self.pool.begin_fill(pages)
        return Handoff(sequence, sequence.num_computed, end_token, pages)

    def _commit(self, sequence: Sequence) -> None:
        self.pool.commit(sequence.token_ids, sequence.keys, sequence.pages, sequence.num_computed)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)

    def _may_be_remote(self, sequence: Sequence) -> bool:
        request = sequence.request
        return request is not None and request.prefiller is not None and sequence.prompt_logprobs is None
