"""The decoder's side of a hand-off: shake hands, send commands, count completions, and never reuse a page too early.

A transfer is `active` until its count is complete. One that fails or is abandoned is `closing`: its pages are in
quarantine until the prefiller confirms that nothing more will be written (TransferClosed), or is proven dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmserve.control.messages import (
    PREFILLER_TO_DECODER,
    PROTOCOL_VERSION,
    CancelTransfer,
    ErrorInfo,
    Message,
    PeerHello,
    PeerPing,
    PeerPong,
    PeerWelcome,
    PrefillCommand,
    PrefillerInfo,
    PrefillStarted,
    TransferClosed,
)
from llmserve.control.sockets import CurveKeys, DealerSocket
from llmserve.engine.core import EngineCore
from llmserve.engine.scheduler import Handoff
from llmserve.transfer.engine import TransferEngine
from llmserve.transfer.layout import KVLayout, PeerIdentity
from llmserve.transfer.reshard import expected_writes

logger = logging.getLogger(__name__)
PING_INTERVAL_S = 0.25
HANDSHAKE_TIMEOUT_S = 8.0


@dataclass(eq=False, slots=True)
class Transfer:
    transfer_id: int
    handoff: Handoff
    prefiller: Prefiller
    deadline_s: float
    quarantined: list[int] = field(default_factory=list)  # once closing


@dataclass(eq=False, slots=True)
class Prefiller:
    """One instance of a prefiller; a restarted one is another object."""

    info: PrefillerInfo
    socket: DealerSocket
    opened_s: float
    last_heard_s: float
    welcomed: bool = False
    identity: PeerIdentity | None = None
    source_tp_size: int = 1
    outbox: list[Message] = field(default_factory=list)  # commands that wait for the welcome
    active: dict[int, Transfer] = field(default_factory=dict)
    closing: dict[int, Transfer] = field(default_factory=dict)
    receiver: asyncio.Task[None] | None = None


class DecodeRole:
    """Wires prefillers to the engine core of a decoder."""

    def __init__(
        self,
        core: EngineCore,
        engine: TransferEngine,
        layout: KVLayout,
        *,
        worker_id: str,
        keys: CurveKeys | None,
        instance_id: str,
        fingerprint: str,
        peer_timeout_s: float,
        prefill_timeout_s: float,
        recompute: bool,
        wake: Callable[[], None],
    ) -> None:
        self.core = core
        self.engine = engine
        self.layout = layout
        self.worker_id = worker_id
        self.keys = keys
        self.instance_id = instance_id
        self.fingerprint = fingerprint
        self.peer_timeout_s = peer_timeout_s
        self.prefill_timeout_s = prefill_timeout_s
        self.recompute = recompute
        self.wake = wake
        self.prefillers: dict[str, Prefiller] = {}  # by instance id
        self.lost: list[Prefiller] = []  # given up, but their quarantined pages are not yet free
        self.by_request: dict[str, Transfer] = {}
        self.num_transfers = 0
        self.num_failures = 0
        self.bytes_received = 0

    # ------------------------------------------------------------------ called by the worker

    def begin(self, handoff: Handoff) -> None:
        """Send a reserved sequence to its prefiller."""
        request = handoff.sequence.request
        assert request is not None and request.prefiller is not None
        prefiller = self._prefiller(request.prefiller)
        transfer_id = self.engine.open_transfer(request.prefiller.instance_id)
        transfer = Transfer(transfer_id, handoff, prefiller, time.monotonic() + self.prefill_timeout_s)
        prefiller.active[transfer_id] = transfer
        self.by_request[handoff.sequence.request_id] = transfer
        self.num_transfers += 1
        command = PrefillCommand(
            transfer_id=transfer_id,
            request_id=handoff.sequence.request_id,
            token_ids=handoff.sequence.token_ids[: handoff.end_token],
            first_token=handoff.first_token,
            pages=handoff.pages,
            cache_salt=request.cache_salt,
            timeout_s=self.prefill_timeout_s,
        )
        self._send(prefiller, command)

    def abort(self, request_id: str) -> None:
        """The client is gone: stop the writer, keep the pages in quarantine until it has stopped."""
        transfer = self.by_request.get(request_id)
        if transfer is not None:
            self._fail(transfer, drained=False, error=None)

    def poll(self) -> bool:
        """Look at the completion counters; returns True when transfers are still active."""
        pending = False
        for prefiller in list(self.prefillers.values()):
            for transfer in list(prefiller.active.values()):
                progress = self.engine.progress(transfer.transfer_id)
                if progress.done >= self._expected(transfer):  # first: a sender may end after its last write
                    self._complete(transfer)
                elif progress.failed > 0:
                    self._fail(transfer, drained=False, error=self._error("a KV page write failed", "transfer_failed"))
                else:
                    pending = True
        return pending

    async def run(self) -> None:
        """Ping prefillers and watch deadlines until cancelled."""
        try:
            while True:
                now = time.monotonic()
                for prefiller in list(self.prefillers.values()):
                    self._watch(prefiller, now)
                for prefiller in list(self.lost):
                    self._bury(prefiller)
                await asyncio.sleep(PING_INTERVAL_S)
        finally:
            for prefiller in [*self.prefillers.values(), *self.lost]:
                self._disconnect(prefiller)

    # ------------------------------------------------------------------ peers

    def _prefiller(self, info: PrefillerInfo) -> Prefiller:
        """The connection to this instance, opened and greeted if it is new."""
        known = self.prefillers.get(info.instance_id)
        if known is not None:
            return known
        now = time.monotonic()
        prefiller = Prefiller(info, DealerSocket(info.address, PREFILLER_TO_DECODER, self.keys), now, now)
        self.prefillers[info.instance_id] = prefiller
        prefiller.socket.send(
            PeerHello(
                protocol=PROTOCOL_VERSION,
                instance_id=self.instance_id,
                worker_id=self.worker_id,
                model_fingerprint=self.fingerprint,
                layout=self.layout,
                memory=self.engine.descriptor(),
            )
        )
        prefiller.receiver = asyncio.get_running_loop().create_task(self._receive(prefiller))
        return prefiller

    def _send(self, prefiller: Prefiller, message: Message) -> None:
        if prefiller.welcomed:
            prefiller.socket.send(message)
        else:
            prefiller.outbox.append(message)

    async def _receive(self, prefiller: Prefiller) -> None:
        while True:
            message = await prefiller.socket.recv()
            prefiller.last_heard_s = time.monotonic()
            match message:
                case PeerWelcome():
                    self._welcome(prefiller, message)
                case PrefillStarted():
                    self._started(prefiller, message)
                case TransferClosed():
                    self._closed(prefiller, message)
                case PeerPong():
                    pass

    def _welcome(self, prefiller: Prefiller, message: PeerWelcome) -> None:
        if message.instance_id != prefiller.info.instance_id:
            self._lose(prefiller, "another instance answered at its address")
            return
        if not message.accepted:
            logger.error("prefiller %s refuses the hand-off: %s", prefiller.info.worker_id, message.reason)
            self._lose(prefiller, message.reason)
            return
        prefiller.welcomed = True
        prefiller.identity = message.identity
        prefiller.source_tp_size = message.source_tp_size
        outbox, prefiller.outbox = prefiller.outbox, []
        for queued in outbox:
            prefiller.socket.send(queued)

    def _started(self, prefiller: Prefiller, message: PrefillStarted) -> None:
        transfer = prefiller.active.get(message.transfer_id)
        if transfer is not None:
            sequence = transfer.handoff.sequence
            sequence.num_cached_tokens = max(sequence.num_cached_tokens, message.num_cached_tokens)

    def _closed(self, prefiller: Prefiller, message: TransferClosed) -> None:
        """Nothing more will be written: free the quarantine, or end an active transfer that the prefiller gave up."""
        closing = prefiller.closing.pop(message.transfer_id, None)
        if closing is not None:
            self._release(closing)
            return
        active = prefiller.active.get(message.transfer_id)
        if active is None:
            return
        error = message.error or self._error("the prefiller gave the request up", "prefill_aborted")
        self._fail(active, drained=True, error=error)
        if error.code == "no_peer":
            self._lose(prefiller, "it has forgotten this decoder")

    def _watch(self, prefiller: Prefiller, now: float) -> None:
        for transfer in [t for t in prefiller.active.values() if t.deadline_s < now]:
            self._fail(transfer, drained=False, error=self._error("prefill took too long", "prefill_timeout"))
        silent_s = now - prefiller.last_heard_s
        if not prefiller.welcomed:
            if now - prefiller.opened_s > HANDSHAKE_TIMEOUT_S:
                self._lose(prefiller, f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s")
        elif silent_s > self.peer_timeout_s or self._gone(prefiller):
            self._lose(prefiller, f"silent for {silent_s:.1f} s")
        else:
            prefiller.socket.send(PeerPing(instance_id=self.instance_id))

    def _lose(self, prefiller: Prefiller, reason: str) -> None:
        """Its transfers fail now; their pages stay in quarantine until it confirms, or is proven gone.

        A later request greets the instance anew, if it lives.
        """
        logger.warning("prefiller %s is lost: %s", prefiller.info.worker_id, reason)
        del self.prefillers[prefiller.info.instance_id]
        self.lost.append(prefiller)
        for transfer in list(prefiller.active.values()):
            self._fail(transfer, drained=False, error=self._error(f"prefiller lost: {reason}", "prefiller_lost"))
        self._bury(prefiller)

    def _bury(self, prefiller: Prefiller) -> None:
        """Free the quarantine of a lost prefiller once it provably cannot write any more."""
        could_write = prefiller.identity is not None and not self.engine.fences_writes and not self._gone(prefiller)
        if prefiller.closing and could_write:
            return  # silent but perhaps alive
        for transfer in prefiller.closing.values():
            self._release(transfer)
        prefiller.closing.clear()
        self._disconnect(prefiller)
        self.lost.remove(prefiller)

    def _gone(self, prefiller: Prefiller) -> bool:
        return prefiller.identity is not None and self.engine.sender_gone(prefiller.identity)

    def _disconnect(self, prefiller: Prefiller) -> None:
        if prefiller.receiver is not None:
            prefiller.receiver.cancel()
        prefiller.socket.close()

    # ------------------------------------------------------------------ ends of a transfer

    def _complete(self, transfer: Transfer) -> None:
        size_bytes = 2 * self.layout.num_layers * len(transfer.handoff.pages) * self.layout.page_bytes
        self.bytes_received += size_bytes
        self._take(transfer)
        self.engine.close_transfer(transfer.transfer_id)
        self.core.kv_arrived(transfer.handoff, transfer.prefiller.info.worker_id, size_bytes)
        self.wake()

    def _fail(self, transfer: Transfer, *, drained: bool, error: ErrorInfo | None) -> None:
        """End an active transfer. A wrong request fails with the error; anything else is recomputed here if allowed."""
        self._take(transfer)
        self.num_failures += error is not None
        retry = self.recompute and (error is None or error.status != 400)
        transfer.quarantined = self.core.kv_failed(transfer.handoff, drained=drained, error=None if retry else error)
        if drained:
            self.engine.close_transfer(transfer.transfer_id)
        else:
            transfer.prefiller.closing[transfer.transfer_id] = transfer
            self._send(transfer.prefiller, CancelTransfer(transfer_id=transfer.transfer_id))
        self.wake()

    def _expected(self, transfer: Transfer) -> int:
        sources = transfer.prefiller.source_tp_size  # known for sure only after the welcome, before the first write
        return expected_writes(len(transfer.handoff.pages), sources, self.layout)

    def _take(self, transfer: Transfer) -> None:
        del transfer.prefiller.active[transfer.transfer_id]
        del self.by_request[transfer.handoff.sequence.request_id]

    def _release(self, transfer: Transfer) -> None:
        self.engine.close_transfer(transfer.transfer_id)
        self.core.release_quarantine(transfer.quarantined)
        self.wake()

    def _error(self, message: str, code: str) -> ErrorInfo:
        return ErrorInfo(status=503, message=message, code=code)
