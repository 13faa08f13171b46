"""The prefiller's side of a hand-off: take commands from decoders, compute prompts, write pages layer by layer.

Messages come in on one ROUTER socket. For each decoder there is a connection to its registered memory; for each
command a `Job`. Pages are posted from the layer hook, in the step thread, as soon as a layer of a chunk is written, so
that the transfer overlaps the computation. Nothing is sent when it is complete: the decoder counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmserve.control.messages import (
    DECODER_TO_PREFILLER,
    PROTOCOL_VERSION,
    CancelTransfer,
    ErrorInfo,
    PeerHello,
    PeerPing,
    PeerPong,
    PeerWelcome,
    PrefillCommand,
    PrefillStarted,
    TransferClosed,
)
from llmserve.control.sockets import CurveKeys, RouterSocket
from llmserve.engine.core import EngineCore, error_info
from llmserve.engine.scheduler import ScheduledSequence, StepPlan
from llmserve.engine.sequence import Sequence
from llmserve.errors import LlmserveError
from llmserve.transfer.engine import Peer, TransferEngine, TransferError
from llmserve.transfer.layout import KVLayout
from llmserve.transfer.reshard import PagePlan, ReshardError, plan_page_copies

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Decoder:
    """A decoder that has shaken hands: how to write into its memory, and when it was last heard."""

    instance_id: str
    peer: Peer
    plan: PagePlan
    last_heard_s: float


@dataclass(eq=False, slots=True)
class Job:
    """One PrefillCommand in work."""

    command: PrefillCommand
    identity: bytes
    decoder: Decoder
    sequence: Sequence
    deadline_s: float
    sent_until: int  # index into sequence.pages: pages before it have been posted
    posting: tuple[int, int] = (0, 0)  # pages [low, high) that the running step posts after each layer


class PrefillRole:
    """Wires decoders to the engine core of a prefiller."""

    def __init__(
        self,
        core: EngineCore,
        engine: TransferEngine,
        layout: KVLayout,
        *,
        instance_id: str,
        fingerprint: str,
        host: str,
        keys: CurveKeys | None,
        peer_timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self.core = core
        self.engine = engine
        self.layout = layout
        self.instance_id = instance_id
        self.fingerprint = fingerprint
        self.peer_timeout_s = peer_timeout_s
        self.wake = wake
        self.socket = RouterSocket(f"tcp://{host}:*", DECODER_TO_PREFILLER, keys)
        self.decoders: dict[bytes, Decoder] = {}
        self.jobs: dict[str, Job] = {}
        self.num_failures = 0
        self._tasks: set[asyncio.Task[None]] = set()
        core.on_prefilled = self._prefilled

    @property
    def address(self) -> str:
        return self.socket.address

    async def run(self) -> None:
        """Serve messages and watch deadlines until cancelled."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                identity, message = await self.socket.recv()
                self._handle(identity, message)
        finally:
            watch.cancel()
            self.socket.close()

    # ------------------------------------------------------------------ messages

    def _handle(self, identity: bytes, message: Any) -> None:
        decoder = self.decoders.get(identity)
        if decoder is not None:
            decoder.last_heard_s = time.monotonic()
        match message:
            case PeerHello():
                self._spawn(self._shake_hands(identity, message))
            case PrefillCommand():
                self._begin(identity, message)
            case CancelTransfer():
                self._spawn(self._cancel(identity, message.transfer_id))
            case PeerPing():
                self.socket.send(identity, PeerPong(instance_id=self.instance_id))

    async def _shake_hands(self, identity: bytes, hello: PeerHello) -> None:
        """Check the reshard plan, connect to the decoder's memory, answer. A refusal says why."""
        try:
            if hello.protocol != PROTOCOL_VERSION:
                raise ReshardError(f"protocol {hello.protocol} of the decoder, {PROTOCOL_VERSION} of the prefiller")
            if hello.model_fingerprint != self.fingerprint:
                raise ReshardError("decoder and prefiller serve different checkpoints")
            plan = plan_page_copies(self.layout, hello.layout)
            loop = asyncio.get_running_loop()
            peer = await loop.run_in_executor(None, self.engine.connect, hello.memory, CONNECT_TIMEOUT_S)
        except (ReshardError, TransferError) as error:
            logger.warning("handshake with %s refused: %s", hello.worker_id, error)
            self.socket.send(identity, self._welcome(accepted=False, reason=str(error)))
            return
        self.decoders[identity] = Decoder(hello.instance_id, peer, plan, time.monotonic())
        self.socket.send(identity, self._welcome(accepted=True))

    def _welcome(self, *, accepted: bool, reason: str = "") -> PeerWelcome:
        return PeerWelcome(
            instance_id=self.instance_id,
            accepted=accepted,
            reason=reason,
            source_tp_size=self.layout.tp_size,
            identity=self.engine.identity,
        )

    def _begin(self, identity: bytes, command: PrefillCommand) -> None:
        decoder = self.decoders.get(identity)
        if decoder is None:
            self._close(identity, command.transfer_id, ErrorInfo(status=503, message="no handshake", code="no_peer"))
            return
        key = job_key(identity, command.transfer_id)
        try:
            sequence = self.core.add_prefill(key, command.token_ids, command.cache_salt)
        except LlmserveError as error:
            self._close(identity, command.transfer_id, error_info(error))
            return
        first_page = command.first_token // self.layout.page_size
        self.jobs[key] = Job(
            command, identity, decoder, sequence, time.monotonic() + command.timeout_s, sent_until=first_page
        )
        self.wake()

    # ------------------------------------------------------------------ writes

    def before_step(self, plan: StepPlan) -> None:
        """Fix, before the step runs, which pages each job may post after each layer of this chunk."""
        for item in plan.items:
            job = self.jobs.get(item.sequence.request_id)
            if job is None:
                continue
            if item.sequence.num_computed == item.sequence.num_cached_tokens and job.sent_until == self._first(job):
                cached = PrefillStarted(
                    transfer_id=job.command.transfer_id, num_cached_tokens=item.sequence.num_cached_tokens
                )
                self.socket.send(job.identity, cached)
            job.posting = (job.sent_until, max(job.sent_until, self._complete_pages(item)))
            job.sent_until = job.posting[1]

    def after_layer(self, plan: StepPlan, layer: int) -> None:
        """Layer hook, in the step thread: post the pages of this layer that are final now."""
        for item in plan.items:
            job = self.jobs.get(item.sequence.request_id)
            if job is None or job.posting[0] == job.posting[1]:
                continue
            low, high = job.posting
            first = self._first(job)
            self.engine.submit_page_writes(
                job.decoder.peer,
                job.command.transfer_id,
                layer,
                item.sequence.pages[low:high],
                job.command.pages[low - first : high - first],
                job.decoder.plan,
            )

    def _first(self, job: Job) -> int:
        return job.command.first_token // self.layout.page_size

    def _complete_pages(self, item: ScheduledSequence) -> int:
        """Pages that are final after this chunk: full ones, and the last one at the end of the prompt."""
        end = item.start + item.count
        if end == item.sequence.num_tokens:
            return len(item.sequence.pages)
        return end // self.layout.page_size

    def _prefilled(self, sequence: Sequence) -> None:
        job = self.jobs.get(sequence.request_id)
        if job is not None:
            self._spawn(self._finish(sequence.request_id, job))

    async def _finish(self, key: str, job: Job) -> None:
        """Keep the source pages until the last write has left."""
        await asyncio.wrap_future(job.decoder.peer.drain())
        self.jobs.pop(key, None)
        self.core.finish_prefill(key)

    # ------------------------------------------------------------------ ends before completion

    async def _cancel(self, identity: bytes, transfer_id: int, error: ErrorInfo | None = None) -> None:
        """Stop, drain, confirm. Also confirmed when nothing is known of the transfer: then nothing is in flight."""
        key = job_key(identity, transfer_id)
        job = self.jobs.pop(key, None)
        if job is not None:
            self.num_failures += 1
            await asyncio.wrap_future(self.engine.cancel(job.decoder.peer, transfer_id))
            self.core.abort(key)
        self._close(identity, transfer_id, error)

    def _close(self, identity: bytes, transfer_id: int, error: ErrorInfo | None) -> None:
        self.socket.send(identity, TransferClosed(transfer_id=transfer_id, error=error))

    async def _watch(self) -> None:
        """End jobs past their deadline, and everything of a decoder that went silent."""
        while True:
            await asyncio.sleep(self.peer_timeout_s / 4)
            now = time.monotonic()
            for job in [job for job in self.jobs.values() if job.deadline_s < now]:
                error = ErrorInfo(status=503, message="prefill took too long", code="prefill_timeout")
                await self._cancel(job.identity, job.command.transfer_id, error)
            for identity, decoder in list(self.decoders.items()):
                if decoder.last_heard_s < now - self.peer_timeout_s:
                    await self._forget(identity, decoder)

    async def _forget(self, identity: bytes, decoder: Decoder) -> None:
        logger.warning("decoder %s is silent: its jobs end", decoder.instance_id)
        for job in [job for job in self.jobs.values() if job.identity == identity]:
            await self._cancel(identity, job.command.transfer_id)
        del self.decoders[identity]
        self.engine.disconnect(decoder.peer)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def job_key(identity: bytes, transfer_id: int) -> str:
    """Unique over all decoders: transfer ids are only unique in the decoder that chose them."""
    return f"{identity.hex()}:{transfer_id}"
