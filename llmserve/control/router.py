"""The router: takes sequences from the front, gives each a decoder and a prefiller, and brings the tokens back."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmserve.config import RouterConfig
from llmserve.control.membership import Membership, Worker
from llmserve.control.messages import (
    WORKER_TO_ROUTER,
    AbortRequest,
    ErrorInfo,
    GenerateRequest,
    Heartbeat,
    HeartbeatAck,
    ModelInfo,
    PrefillerInfo,
    Refused,
    Register,
    Registered,
    Reregister,
    StepOutputs,
    TokenOutput,
)
from llmserve.control.policy import Policy, block_keys
from llmserve.control.sockets import CurveKeys, RouterSocket
from llmserve.errors import InvalidRequestError, OverloadedError, UnavailableError

logger = logging.getLogger(__name__)
MAX_RETRIES = 2
SHUTDOWN_MESSAGE = "the server is shutting down"
WATCH_INTERVAL_S = 0.1
LATE_S = 0.2
STALL_LIMIT_S = 30.0  # a worker with work and no finished step for so long makes no progress


@dataclass(eq=False)
class Stream:
    """Outputs of one sequence (a RequestStream), to be iterated once: leaving the loop aborts what still runs.

    Outputs wait here without a limit of their own: a sequence has at most `max_tokens` of them, and a slow consumer
    must lose none.
    """

    router: Router
    request: GenerateRequest
    keys: list[bytes]
    deadline_s: float  # for finding a worker
    decoder: Worker | None = None
    wire_id: str = ""  # request id that the decoder knows: another one for each attempt
    prompt_instance: str = ""  # who computes the prompt, until the first output
    queued_tokens: int = 0  # that this prompt added to the queue there
    attempts: int = 0
    started: bool = False  # an output has come
    ended: bool = False
    outputs: deque[TokenOutput] = field(default_factory=deque)
    arrival: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        try:
            while True:
                while not self.outputs:
                    if self.ended:
                        return
                    self.arrival.clear()
                    await self.arrival.wait()
                output = self.outputs.popleft()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort()

    def abort(self) -> None:
        self.router.abort(self)

    def put(self, output: TokenOutput) -> None:
        self.started = True
        self.ended = output.finish_reason is not None
        self.outputs.append(output)
        self.arrival.set()


class Router:
    """Implements Backend. All methods belong to the loop in which `start` ran."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.router_id = secrets.token_hex(8)
        self.membership = Membership(time.monotonic, config.worker_timeout_s)
        self.policy = Policy(time.monotonic)
        self.streams: dict[str, Stream] = {}  # in flight, by request id
        self._dispatched: dict[str, Stream] = {}  # with a decoder, by wire id
        self.waiting: deque[Stream] = deque()  # no decoder is alive
        self.counters: Counter[str] = Counter()
        self.address = ""
        self._socket: RouterSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Bind and serve. Raises ConfigError when the address cannot be bound."""
        self._socket = RouterSocket(self.config.bind, WORKER_TO_ROUTER, CurveKeys.load(self.config.curve_dir))
        self.address = self._socket.address
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in list(self.streams.values()):
            self._fail(stream, ErrorInfo(status=503, message=SHUTDOWN_MESSAGE, code="shutdown"))
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # ------------------------------------------------------------------ Backend

    @property
    def model(self) -> ModelInfo | None:
        return self.membership.model

    def workers(self) -> list[Worker]:
        return self.membership.workers()

    def heartbeat_ages(self) -> dict[str, float]:
        """Seconds since each live worker was last heard, by worker_id."""
        return self.membership.heartbeat_ages()

    def ready(self) -> bool:
        return any(worker.decodes for worker in self.workers())

    def progressing(self) -> bool:
        workers = self.workers()
        return self.ready() and all(worker.load.stalled_s < STALL_LIMIT_S for worker in workers)

    def submit(self, request: GenerateRequest) -> Stream:
        """Start a sequence.

        Raises OverloadedError when `max_pending` are in flight, InvalidRequestError when one of them has the same
        request id, UnavailableError when the router does not run.
        """
        if self._socket is None:
            raise UnavailableError(SHUTDOWN_MESSAGE, code="shutdown")
        if request.request_id in self.streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if len(self.streams) >= self.config.max_pending:
            raise OverloadedError(f"{len(self.streams)} sequences are in flight, the limit; try again later")
        keys = block_keys(request.prompt_token_ids, request.cache_salt)
        stream = Stream(self, request, keys, time.monotonic() + self.config.no_worker_timeout_s)
        self.streams[request.request_id] = stream
        self.counters["submitted"] += 1
        self._dispatch(stream)
        return stream

    def abort(self, stream: Stream) -> None:
        """Idempotent. The worker frees the pages as soon as it reads the message."""
        stream.outputs.clear()
        if stream.ended:
            return
        stream.ended = True
        stream.arrival.set()
        self.counters["aborted"] += 1
        if stream.decoder is not None:
            self._send(stream.decoder, AbortRequest(request_id=stream.wire_id))
        self._forget(stream)

    # ------------------------------------------------------------------ dispatch

    def _dispatch(self, stream: Stream) -> None:
        """Give the sequence to a decoder; without one it waits for one to (re)join."""
        request = stream.request
        bounds = {w.instance_id: w.max_batch for w in self.workers() if w.decodes}
        chosen = self.policy.choose(bounds, stream.keys, len(request.prompt_token_ids))
        decoder = self.membership.find(chosen) if chosen is not None else None
        if decoder is None:
            self.waiting.append(stream)
            return
        stream.attempts += 1
        # A worker that was given up may still generate an earlier attempt: its tokens must not be taken for this one's.
        stream.wire_id = request.request_id if stream.attempts == 1 else f"{request.request_id}~{stream.attempts}"
        stream.decoder = decoder
        self._dispatched[stream.wire_id] = stream
        prefiller = self._choose_prefiller(stream) if decoder.role == "decode" else None
        self._assign(stream, decoder, prefiller)
        if not self._send(decoder, msgspec.structs.replace(request, request_id=stream.wire_id, prefiller=prefiller)):
            self.membership.lose(decoder)
            self._take_lost()

    def _choose_prefiller(self, stream: Stream) -> PrefillerInfo | None:
        """The shortest queue; None when no prefiller is alive: then the decoder computes the prompt itself."""
        bounds = {w.instance_id: math.inf for w in self.workers() if w.role == "prefill"}
        chosen = self.policy.choose(bounds, stream.keys, len(stream.request.prompt_token_ids))
        worker = self.membership.find(chosen) if chosen is not None else None
        if worker is None:
            return None
        return PrefillerInfo(worker_id=worker.worker_id, instance_id=worker.instance_id, address=worker.peer_address)

    def _assign(self, stream: Stream, decoder: Worker, prefiller: PrefillerInfo | None) -> None:
        """Charge the prompt to who computes it, and the sequence to the decoder (second: it counts as cached then)."""
        stream.prompt_instance = prefiller.instance_id if prefiller is not None else decoder.instance_id
        num_tokens = len(stream.request.prompt_token_ids)
        stream.queued_tokens = self.policy.begin_prompt(stream.prompt_instance, stream.keys, num_tokens)
        self.policy.begin_sequence(decoder.instance_id, stream.keys)

    def _prompt_done(self, stream: Stream) -> None:
        if stream.prompt_instance:
            self.policy.end_prompt(stream.prompt_instance, stream.queued_tokens)
            stream.prompt_instance = ""

    def _unassign(self, stream: Stream) -> None:
        self._prompt_done(stream)
        if stream.decoder is not None:
            self.policy.end_sequence(stream.decoder.instance_id)
            del self._dispatched[stream.wire_id]
            stream.decoder = None

    def _forget(self, stream: Stream) -> None:
        self._unassign(stream)
        self.streams.pop(stream.request.request_id, None)

    def _fail(self, stream: Stream, error: ErrorInfo) -> None:
        self.counters["failed"] += 1
        self._forget(stream)
        stream.put(TokenOutput(request_id=stream.request.request_id, finish_reason="error", error=error))

    # ------------------------------------------------------------------ workers

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            identity, message = await self._socket.recv()
            try:
                self._handle(identity, message)
            except Exception:
                logger.exception("a %s could not be handled", type(message).__name__)  # the others must be

    def _handle(self, identity: bytes, message: Any) -> None:
        match message:
            case StepOutputs():
                self._outputs(message)
            case Heartbeat():
                known = self.membership.heartbeat(identity, message.instance_id, message.load)
                self._take_lost()
                self._reply(identity, HeartbeatAck(router_id=self.router_id) if known else Reregister())
            case Register():
                self._register(identity, message)

    def _register(self, identity: bytes, message: Register) -> None:
        refusal = self.membership.register(identity, message)
        if refusal is not None:
            logger.error("refused: %s", refusal)
            self._reply(identity, Refused(reason=refusal))
            return
        logger.info("%s (%s, pid %d) has joined", message.worker_id, message.role, message.pid)
        interval_s = self.config.heartbeat_interval_s
        self._reply(identity, Registered(router_id=self.router_id, heartbeat_interval_s=interval_s))
        self._take_lost()
        waiting, self.waiting = self.waiting, deque()
        for stream in waiting:
            if not stream.ended:
                self._dispatch(stream)

    def _outputs(self, message: StepOutputs) -> None:
        worker = self.membership.find(message.instance_id)
        if worker is None:
            return  # of an instance that was given up: its sequences have ended or run elsewhere
        self.membership.heard(worker)
        for output in message.outputs:
            stream = self._dispatched.get(output.request_id)
            if stream is None or stream.decoder is not worker:
                # Ended here meanwhile, or begun by a router before this one: nobody reads it, so it must not run on.
                if output.finish_reason is None:
                    self._send(worker, AbortRequest(request_id=output.request_id))
                continue
            self._prompt_done(stream)
            if output.finish_reason is not None:
                self.counters["failed" if output.error is not None else "finished"] += 1
                self._forget(stream)
            output.request_id = stream.request.request_id
            stream.put(output)

    def worker_lost(self, pid: int, worker_id: str | None = None) -> None:
        """A supervisor saw the process end: its sequences are handled now, not at the next missed heartbeat.

        `worker_id` tells it from a process of another host that has the same id (in containers, all have).
        """
        self.membership.lose_process(pid, worker_id)
        self._take_lost()

    def _take_lost(self) -> None:
        """A sequence without output goes to another decoder; one with output ends with an error."""
        for worker in self.membership.take_lost():
            logger.warning("%s (pid %d) is lost", worker.worker_id, worker.pid)
            self.counters["workers_lost"] += 1
            orphans = [stream for stream in self.streams.values() if stream.decoder is worker]
            for stream in orphans:
                self._send(worker, AbortRequest(request_id=stream.wire_id))  # it may only be silent, and come back
                self._unassign(stream)
            for stream in self.streams.values():
                if stream.prompt_instance == worker.instance_id:
                    self._prompt_done(stream)  # its decoder notices, and computes the prompt itself
            self.policy.forget(worker.instance_id)  # before new work: this instance may have joined again already
            for stream in orphans:
                self._retry(stream, worker)

    def _retry(self, stream: Stream, lost: Worker) -> None:
        if stream.started or stream.attempts > MAX_RETRIES:
            message = f"worker {lost.worker_id} was lost while it generated this answer"
            self._fail(stream, ErrorInfo(status=503, message=message, code="worker_lost"))
        else:
            self.counters["retried"] += 1
            # From the last sign of life, so that the time until the loss was noticed counts as well.
            stream.deadline_s = lost.last_heard_s + self.config.no_worker_timeout_s
            self._dispatch(stream)

    async def _watch(self) -> None:
        while True:
            due_s = time.monotonic() + WATCH_INTERVAL_S
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            if now < due_s + LATE_S:  # else this loop was held up: first read the heartbeats that came meanwhile
                self.membership.expire()
                self._take_lost()
            for stream in [stream for stream in self.waiting if stream.ended or stream.deadline_s < now]:
                self.waiting.remove(stream)
                if not stream.ended:
                    message = f"no decoder joined within {self.config.no_worker_timeout_s:g} s"
                    self._fail(stream, ErrorInfo(status=503, message=message, code="no_worker"))

    def _send(self, worker: Worker, message: Any) -> bool:
        return self._reply(worker.identity, message)

    def _reply(self, identity: bytes, message: Any) -> bool:
        """False when that connection is gone."""
        return self._socket is not None and self._socket.send(identity, message)
