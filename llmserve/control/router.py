"""The router: takes sequences from the front, gives each a decoder and a prefiller, and brings the tokens back."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

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
from llmserve.control.policy import DECODE_TOKENS, Policy, block_keys
from llmserve.control.sockets import CurveKeys, RouterSocket
from llmserve.errors import OverloadedError

logger = logging.getLogger(__name__)
MAX_RETRIES = 2
WATCH_INTERVAL_S = 0.1
STALL_LIMIT_S = 30.0  # a worker with work and no finished step for so long makes no progress


@dataclass(eq=False)
class Stream:
    """Outputs of one sequence (a RequestStream)."""

    router: Router
    request: GenerateRequest
    keys: list[bytes]
    deadline_s: float  # for finding a worker
    decoder: Worker | None = None
    prefiller: str = ""  # instance id
    attempts: int = 0
    started: bool = False  # an output has come
    ended: bool = False
    outputs: deque[TokenOutput] = field(default_factory=deque)
    arrival: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
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
        self.streams: dict[str, Stream] = {}
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
            self._fail(stream, ErrorInfo(status=503, message="the server is shutting down", code="shutdown"))
        if self._socket is not None:
            self._socket.close()

    # ------------------------------------------------------------------ Backend

    @property
    def model(self) -> ModelInfo | None:
        return self.membership.model

    def workers(self) -> list[Worker]:
        return self.membership.workers()

    def ready(self) -> bool:
        return any(worker.decodes for worker in self.workers())

    def progressing(self) -> bool:
        workers = self.workers()
        return self.ready() and all(worker.load.stalled_s < STALL_LIMIT_S for worker in workers)

    def submit(self, request: GenerateRequest) -> Stream:
        """Start a sequence. Raises OverloadedError when `max_pending` are in flight."""
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
        if stream.ended:
            return
        stream.ended = True
        stream.arrival.set()
        self.counters["aborted"] += 1
        if stream.decoder is not None:
            self._send(stream.decoder, AbortRequest(request_id=stream.request.request_id))
        self._forget(stream)

    # ------------------------------------------------------------------ dispatch

    def _dispatch(self, stream: Stream) -> None:
        """Give the sequence to a decoder; without one it waits for one to (re)join."""
        request = stream.request
        num_tokens = len(request.prompt_token_ids)
        decoders = {w.instance_id: w.max_batch for w in self.workers() if w.decodes}
        chosen = self.policy.choose(decoders, stream.keys, num_tokens)
        decoder = self.membership.find(chosen) if chosen is not None else None
        if decoder is None:
            self.waiting.append(stream)
            return
        stream.attempts += 1
        stream.decoder = decoder
        self.policy.assign(decoder.instance_id, stream.keys, DECODE_TOKENS)
        request.prefiller = self._choose_prefiller(stream, num_tokens) if decoder.role == "decode" else None
        if not self._send(decoder, request):
            self._lost(decoder)

    def _choose_prefiller(self, stream: Stream, num_tokens: int) -> PrefillerInfo | None:
        """None when no prefiller is alive: then the decoder computes the prompt itself."""
        candidates = {w.instance_id: w.max_batch for w in self.workers() if w.role == "prefill"}
        chosen = self.policy.choose(candidates, stream.keys, num_tokens)
        worker = self.membership.find(chosen) if chosen is not None else None
        if worker is None:
            return None
        stream.prefiller = worker.instance_id
        self.policy.assign(worker.instance_id, stream.keys, num_tokens)
        return PrefillerInfo(worker_id=worker.worker_id, instance_id=worker.instance_id, address=worker.peer_address)

    def _release_prefiller(self, stream: Stream) -> None:
        if stream.prefiller:
            self.policy.release(stream.prefiller, len(stream.request.prompt_token_ids))
            stream.prefiller = ""

    def _unassign(self, stream: Stream) -> None:
        self._release_prefiller(stream)
        if stream.decoder is not None:
            self.policy.release(stream.decoder.instance_id, DECODE_TOKENS)
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
            match message:
                case StepOutputs():
                    self._outputs(message)
                case Heartbeat():
                    known = self.membership.heartbeat(message.instance_id, message.load)
                    reply = HeartbeatAck(router_id=self.router_id) if known else Reregister()
                    self._socket.send(identity, reply)
                case Register():
                    self._register(identity, message)

    def _register(self, identity: bytes, message: Register) -> None:
        assert self._socket is not None
        refusal = self.membership.register(identity, message)
        if refusal is not None:
            logger.error("refused: %s", refusal)
            self._socket.send(identity, Refused(reason=refusal))
            return
        logger.info("%s (%s, pid %d) has joined", message.worker_id, message.role, message.pid)
        interval_s = self.config.heartbeat_interval_s
        self._socket.send(identity, Registered(router_id=self.router_id, heartbeat_interval_s=interval_s))
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
            stream = self.streams.get(output.request_id)
            if stream is None or stream.decoder is not worker:
                continue  # aborted or finished meanwhile
            self._release_prefiller(stream)
            if output.finish_reason is not None:
                self.counters["failed" if output.error is not None else "finished"] += 1
                self._forget(stream)
            stream.put(output)

    def worker_lost(self, pid: int) -> None:
        """A supervisor saw the process end: its sequences are handled now, not at the next missed heartbeat."""
        self.membership.lose_pid(pid)
        self._take_lost()

    def _lost(self, worker: Worker) -> None:
        self.membership.lose_pid(worker.pid)
        self._take_lost()

    def _take_lost(self) -> None:
        """A sequence without output goes to another decoder; one with output ends with an error."""
        for worker in self.membership.take_lost():
            logger.warning("%s (pid %d) is lost", worker.worker_id, worker.pid)
            self.counters["workers_lost"] += 1
            for stream in [s for s in self.streams.values() if s.decoder is worker]:
                self._unassign(stream)
                if stream.started or stream.attempts > MAX_RETRIES:
                    message = f"worker {worker.worker_id} was lost while it generated this answer"
                    self._fail(stream, ErrorInfo(status=503, message=message, code="worker_lost"))
                else:
                    self.counters["retried"] += 1
                    stream.deadline_s = time.monotonic() + self.config.no_worker_timeout_s
                    self._dispatch(stream)
            self.policy.forget(worker.instance_id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.membership.expire()
            self._take_lost()
            now = time.monotonic()
            while self.waiting and (self.waiting[0].ended or self.waiting[0].deadline_s < now):
                stream = self.waiting.popleft()
                if not stream.ended:
                    message = f"no decoder joined within {self.config.no_worker_timeout_s:g} s"
                    self._fail(stream, ErrorInfo(status=503, message=message, code="no_worker"))

    def _send(self, worker: Worker, message: Any) -> bool:
        return self._socket is not None and self._socket.send(worker.identity, message)
