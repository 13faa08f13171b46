"""One engine process: the step loop, the link to the router, and the role's side of the hand-off.

The event loop belongs to messages; steps that compute prompts run in one thread beside it, so that heartbeats, aborts
and hand-offs are answered meanwhile. A step of decodes is short, and messages are read between steps.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import uvloop

from llmserve.config import WorkerConfig
from llmserve.control.messages import (
    PROTOCOL_VERSION,
    ROUTER_TO_WORKER,
    AbortRequest,
    Drain,
    GenerateRequest,
    Heartbeat,
    HeartbeatAck,
    Refused,
    Register,
    Registered,
    Reregister,
    StepOutputs,
    TokenOutput,
    WorkerLoad,
)
from llmserve.control.sockets import CurveKeys, DealerSocket
from llmserve.engine.core import EngineCore, error_info
from llmserve.engine.decode_role import DecodeRole
from llmserve.engine.loading import LoadedEngine, load_engine
from llmserve.engine.prefill_role import PrefillRole
from llmserve.errors import ConfigError, LlmserveError

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.001  # completion counters, when no step runs
IDLE_CHECK_S = 0.25
DRAIN_TIMEOUT_S = 60.0

EngineLoader = Callable[[WorkerConfig, str], LoadedEngine]


class Worker:
    """A prefiller, a decoder or a unified worker, by `config.role`."""

    def __init__(self, config: WorkerConfig, loader: EngineLoader = load_engine) -> None:
        self.config = config
        self.instance_id = secrets.token_hex(8)
        self.loaded = loader(config, self.instance_id)
        self.core: EngineCore = self.loaded.core
        self.heartbeat_interval_s = 0.5
        self.stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step")
        self.keys = CurveKeys.load(config.curve_dir)
        self.router = DealerSocket(config.router_address, ROUTER_TO_WORKER, self.keys)
        self.prefill = self._prefill_role() if config.role == "prefill" else None
        self.decode = self._decode_role() if config.role == "decode" else None

    def _prefill_role(self) -> PrefillRole:
        assert self.loaded.transfer is not None
        role = PrefillRole(
            self.core,
            self.loaded.transfer,
            self.loaded.layout,
            instance_id=self.instance_id,
            fingerprint=self.core.model.fingerprint,
            host=self.config.host,
            keys=self.keys,
            peer_timeout_s=self.config.peer_timeout_s,
            wake=self._wake.set,
        )
        self.loaded.set_layer_hook(role.after_layer)
        return role

    def _decode_role(self) -> DecodeRole:
        assert self.loaded.transfer is not None
        return DecodeRole(
            self.core,
            self.loaded.transfer,
            self.loaded.layout,
            worker_id=self.config.worker_id,
            keys=self.keys,
            instance_id=self.instance_id,
            fingerprint=self.core.model.fingerprint,
            peer_timeout_s=self.config.peer_timeout_s,
            prefill_timeout_s=self.config.prefill_timeout_s,
            recompute=self.config.on_prefill_failure == "recompute",
            wake=self._wake.set,
        )

    async def run(self) -> None:
        """Serve until told to stop. Raises ConfigError when the router refuses this worker."""
        roles = [role.run() for role in (self.prefill, self.decode) if role is not None]
        jobs = [self._receive(), self._heartbeats(), self._steps(), *roles]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(job) for job in jobs]
        tasks.append(asyncio.create_task(self.stopping.wait()))
        self._register()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.router.close()
            await asyncio.to_thread(self._thread.shutdown)  # the step that is running may still read and write pages
            self.loaded.close()

    def stop(self) -> None:
        self.stopping.set()

    # ------------------------------------------------------------------ router

    def _register(self) -> None:
        self.router.send(
            Register(
                protocol=PROTOCOL_VERSION,
                worker_id=self.config.worker_id,
                instance_id=self.instance_id,
                role=self.config.role,
                model=self.core.model,
                max_batch=self.config.max_batch,
                pid=os.getpid(),
                peer_address=self.prefill.address if self.prefill is not None else "",
            )
        )

    async def _receive(self) -> None:
        while True:
            message = await self.router.recv()
            match message:
                case GenerateRequest():
                    self._generate(message)
                case AbortRequest():
                    self._abort(message.request_id)
                case Registered():
                    self.heartbeat_interval_s = message.heartbeat_interval_s
                    self.router.send(Heartbeat(instance_id=self.instance_id, load=self._load()))
                case Reregister():
                    self._register()
                case Refused():
                    raise ConfigError(f"the router refuses this worker: {message.reason}")
                case Drain():
                    self._draining = asyncio.create_task(self._drain())
                case HeartbeatAck():
                    pass

    def _generate(self, request: GenerateRequest) -> None:
        if self.decode is None:
            request.prefiller = None
        try:
            self.core.add(request)
        except LlmserveError as error:
            refusal = TokenOutput(request_id=request.request_id, finish_reason="error", error=error_info(error))
            self._send([refusal])
            return
        self._wake.set()

    def _abort(self, request_id: str) -> None:
        self.core.abort(request_id)
        if self.decode is not None:
            self.decode.abort(request_id)

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self.core.sequences and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.stop()

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_interval_s)
            self.router.send(Heartbeat(instance_id=self.instance_id, load=self._load()))

    def _load(self) -> WorkerLoad:
        load = self.core.load()
        if self.decode is not None:
            load.counters |= {
                "kv_transfers": self.decode.num_transfers,
                "kv_transfer_failures": self.decode.num_failures,
                "kv_transfer_bytes": self.decode.bytes_received,
            }
        if self.prefill is not None:
            load.counters |= {"kv_transfer_failures": self.prefill.num_failures}
        return load

    def _send(self, outputs: list[TokenOutput]) -> None:
        if outputs:
            for output in outputs:
                output.decode_worker = self.config.worker_id
            self.router.send(StepOutputs(instance_id=self.instance_id, outputs=outputs))

    # ------------------------------------------------------------------ steps

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            transferring = self.decode.poll() if self.decode is not None else False
            plan, handoffs = self.core.schedule()
            if self.decode is not None:
                for handoff in handoffs:
                    self.decode.begin(handoff)
                transferring = transferring or bool(handoffs)
            self._send(self.core.take_outbox())
            if not plan.items:
                await self._idle(transferring)
                continue
            if self.prefill is not None:
                self.prefill.before_step(plan)
            try:
                if plan.is_decode:  # short: two changes of thread would cost more than the loop's waiting for it
                    result = self.core.execute(plan)
                    await asyncio.sleep(0)  # messages have their turn before the next step is planned
                else:
                    result = await loop.run_in_executor(self._thread, self.core.execute, plan)
            except Exception as error:
                logger.exception("model step failed")
                self._send(self.core.step_failed(plan, error))
                continue
            self._send(self.core.complete(plan, result))

    async def _idle(self, transferring: bool) -> None:
        """Wait for a message, for a transfer to move, or to look again (nothing waits for ever)."""
        timeout_s = POLL_INTERVAL_S if transferring else IDLE_CHECK_S
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            pass
        self._wake.clear()


def main(loader: EngineLoader = load_engine) -> None:
    """Entry of a worker process: `python -m llmserve.engine.worker --config-json '{…}'`."""
    parser = argparse.ArgumentParser(prog="llmserve.engine.worker")
    parser.add_argument("--config-json", required=True, help="a WorkerConfig as JSON")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input is closed")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = msgspec.json.decode(arguments.config_json, type=WorkerConfig)
    try:
        uvloop.run(serve_worker(config, loader, exit_with_parent=arguments.exit_with_parent))
    except LlmserveError as error:
        sys.exit(f"error: {error.message}")


async def serve_worker(
    config: WorkerConfig, loader: EngineLoader = load_engine, *, exit_with_parent: bool = False
) -> None:
    """Load and run a worker in this process until a signal, a Drain, or the end of the parent."""
    worker = Worker(config, loader)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    if exit_with_parent:
        threading.Thread(target=_wait_for_parent, args=(loop, worker.stop), daemon=True).start()
    gc.collect()
    gc.freeze()  # the model's objects live as long as the process: never scan them again
    gc.set_threshold(50_000, 20, 20)
    await worker.run()


def _wait_for_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Standard input is a pipe that the parent holds open; its end means that the parent is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stop)
    threading.Timer(5.0, os._exit, args=(1,)).start()  # a step that never returns must not outlive the parent


if __name__ == "__main__":
    main()
