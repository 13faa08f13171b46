"""Every message of the control plane, as tagged msgspec Structs. Nothing else travels over ZeroMQ.

Three conversations: router <-> worker (register, heartbeat, generate, abort, outputs), decoder <-> prefiller
(handshake, prefill commands, cancel and confirm), and nothing more. Encoded with msgpack, never pickle.
"""

from __future__ import annotations

import msgspec

from llmserve.sampling_params import SamplingParams
from llmserve.transfer.layout import KVLayout, MemoryDescriptor, PeerIdentity

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# ---------------------------------------------------------------- what a worker is


class ModelInfo(Message):
    """What the front needs to know of the model that a worker serves."""

    name: str
    fingerprint: str  # equal on all workers that may exchange KV caches
    vocab_size: int
    max_model_len: int  # prompt + generated tokens of one sequence
    eos_token_ids: list[int]


class WorkerLoad(Message):
    """A worker's state at a heartbeat."""

    running: int = 0  # sequences in the batch
    waiting: int = 0  # sequences not yet admitted
    queued_tokens: int = 0  # prompt tokens still to be computed
    free_pages: int = 0
    total_pages: int = 0
    cached_pages: int = 0
    quarantined_pages: int = 0
    steps: int = 0  # model steps since start
    stalled_s: float = 0.0  # seconds with work but without a finished step: 0 when idle
    counters: dict[str, float] = {}  # monotonic counters for /metrics, by metric name


class Register(Message):
    """Worker -> router, first message of a connection and again after a Reregister."""

    protocol: int
    worker_id: str  # stable name, e.g. "decode-0"
    instance_id: str  # new at each start of the process
    role: str  # "prefill" | "decode" | "unified"
    model: ModelInfo
    max_batch: int
    pid: int
    peer_address: str = ""  # where decoders reach a prefiller


class Registered(Message):
    router_id: str
    heartbeat_interval_s: float


class Reregister(Message):
    """Router -> worker: a heartbeat came from an instance that the router does not know."""


class Refused(Message):
    """Router -> worker: registration refused (other model, protocol); the worker exits with this reason."""

    reason: str


class Heartbeat(Message):
    """Worker -> router."""

    instance_id: str
    load: WorkerLoad


class HeartbeatAck(Message):
    """Router -> worker: the router is alive."""

    router_id: str


class Drain(Message):
    """Router -> worker: finish what runs, then exit."""


# ---------------------------------------------------------------- requests


class PrefillerInfo(Message):
    """The prefiller that the router chose for a request."""

    worker_id: str
    instance_id: str
    address: str


class GenerateRequest(Message):
    """One sequence to generate (n > 1 is n of these). `params.n` is ignored by the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    prefiller: PrefillerInfo | None = None  # None: the worker computes the prompt itself


class AbortRequest(Message):
    request_id: str


class TokenLogprob(Message):
    """Raw log-probabilities at one position. `logprob` is None for the first prompt token."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []  # most likely first


class ErrorInfo(Message):
    status: int
    message: str
    param: str | None = None
    code: str | None = None


class TokenOutput(Message):
    """What one step added to one sequence."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None  # as many as token_ids, when asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # once, before or with the first token
    num_cached_tokens: int = 0  # prompt tokens that were found in a prefix cache
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; the last output of the sequence
    stop_token_id: int | None = None  # the EOS or stop id that ended it (it is also the last of token_ids)
    error: ErrorInfo | None = None
    prefill_worker: str = ""  # who computed the prompt, once known
    decode_worker: str = ""
    transferred_bytes: int = 0  # KV bytes handed over for this sequence, in the first output


class StepOutputs(Message):
    """Worker -> router: all outputs of one step in one message."""

    instance_id: str
    outputs: list[TokenOutput]


# ---------------------------------------------------------------- decoder <-> prefiller


class PeerHello(Message):
    """Decoder -> prefiller: handshake. The prefiller checks the reshard plan and connects to the memory."""

    protocol: int
    instance_id: str
    worker_id: str
    model_fingerprint: str
    layout: KVLayout
    memory: MemoryDescriptor


class PeerWelcome(Message):
    """Prefiller -> decoder."""

    instance_id: str
    accepted: bool
    reason: str = ""
    source_tp_size: int = 1
    identity: PeerIdentity | None = None  # proof of death: who writes into my memory


class PrefillCommand(Message):
    """Decoder -> prefiller: compute KV of tokens [0, len(token_ids)) and write that of [first_token, end) to my pages.

    `pages[i]` receives tokens [first_token + i*page_size, ...). `first_token` is a multiple of the page size: what lies
    before it the decoder has in its own prefix cache. The decoder waits for
    `len(pages) * num_layers * 2` page writes counted under `transfer_id`, and for no message.
    """

    transfer_id: int
    request_id: str
    token_ids: list[int]
    first_token: int
    pages: list[int]
    cache_salt: str = ""
    timeout_s: float = 60.0


class PrefillStarted(Message):
    """Prefiller -> decoder: admitted; how many prompt tokens its prefix cache had (information only)."""

    transfer_id: int
    num_cached_tokens: int


class CancelTransfer(Message):
    """Decoder -> prefiller: stop writing. Answered by TransferClosed once nothing more can be written."""

    transfer_id: int


class TransferClosed(Message):
    """Prefiller -> decoder: no write of this transfer is in flight or will follow; its pages may be reused.

    Sent as the answer to CancelTransfer, or by itself with an error when the prefiller gives a request up.
    """

    transfer_id: int
    error: ErrorInfo | None = None


class PeerPing(Message):
    instance_id: str


class PeerPong(Message):
    instance_id: str


ROUTER_TO_WORKER = Registered | Reregister | Refused | HeartbeatAck | Drain | GenerateRequest | AbortRequest
WORKER_TO_ROUTER = Register | Heartbeat | StepOutputs
DECODER_TO_PREFILLER = PeerHello | PrefillCommand | CancelTransfer | PeerPing
PREFILLER_TO_DECODER = PeerWelcome | PrefillStarted | TransferClosed | PeerPong


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


_encoder = msgspec.msgpack.Encoder()
