"""One sequence in the engine: its tokens, its pages and how far it has been computed."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from enum import Enum

from llmserve.control.messages import GenerateRequest, TokenLogprob
from llmserve.engine.prefix_cache import PrefixKeys
from llmserve.engine.sampler import SamplingRow
from llmserve.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"  # no pages, or preempted
    AWAITING_KV = "awaiting_kv"  # pages reserved, a prefiller fills them
    RUNNING = "running"
    HELD = "held"  # computed by a prefiller; pages are kept until the last write has left
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request inside one worker. `token_ids` is prompt and output; tokens [0, num_computed) have KV in `pages`."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    keys: PrefixKeys
    row: SamplingRow
    request: GenerateRequest | None = None  # None on a prefiller
    prefill_only: bool = False
    remote_prefill: bool = False  # the next prefill is done by request.prefiller
    status: SequenceStatus = SequenceStatus.WAITING
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache at the first admission
    transferred_bytes: int = 0
    prefill_worker: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None
    aborted: bool = False  # asked to stop while a step that holds it is running
    admitted_once: bool = False
    arrival_s: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed == 1 and self.num_computed > 0

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.row.output_token_ids.append(token_id)


def sequence_for_generate(request: GenerateRequest, eos_token_ids: list[int]) -> Sequence:
    """A sequence that samples. Without a seed it gets a random stream of its own."""
    params = request.params
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    prompt = list(request.prompt_token_ids)
    sequence = Sequence(
        request_id=request.request_id,
        params=params,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        keys=PrefixKeys(request.cache_salt),
        row=SamplingRow(
            params=params,
            prompt_token_ids=list(prompt),
            output_token_ids=[],
            eos_token_ids=eos_token_ids,
            stream_seed=seed,
        ),
        request=request,
        remote_prefill=request.prefiller is not None and params.prompt_logprobs is None,
    )
    if params.prompt_logprobs is not None:
        sequence.prompt_logprobs = [TokenLogprob(token_id=prompt[0], logprob=None)]
    return sequence


def sequence_for_prefill(request_id: str, token_ids: list[int], cache_salt: str) -> Sequence:
    """A prefiller's sequence: computed to its last token, never sampled."""
    params = SamplingParams()
    row = SamplingRow(params=params, prompt_token_ids=token_ids, output_token_ids=[], eos_token_ids=[], stream_seed=0)
    return Sequence(
        request_id=request_id,
        params=params,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        keys=PrefixKeys(cache_salt),
        row=row,
        prefill_only=True,
    )
