"""Which workers there are: who registered, who is alive, who was replaced. Plain state; the clock is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmserve.control.messages import PROTOCOL_VERSION, ModelInfo, Register, WorkerLoad


@dataclass(eq=False, slots=True)
class Worker:
    """One instance of a worker process. A restarted worker is another object."""

    identity: bytes  # of its ZeroMQ connection
    worker_id: str
    instance_id: str
    role: str
    model: ModelInfo
    max_batch: int
    pid: int
    peer_address: str
    last_heard_s: float
    load: WorkerLoad = field(default_factory=WorkerLoad)

    @property
    def decodes(self) -> bool:
        return self.role in ("decode", "unified")


class Membership:
    """`lost` collects instances that went away since the caller last took them."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._by_instance: dict[str, Worker] = {}
        self.model: ModelInfo | None = None
        self._lost: list[Worker] = []

    def workers(self) -> list[Worker]:
        return list(self._by_instance.values())

    def find(self, instance_id: str) -> Worker | None:
        return self._by_instance.get(instance_id)

    def register(self, identity: bytes, message: Register) -> str | None:
        """Take a worker in, or say why not. A new instance of a known worker_id replaces the old one at once.

        The same instance over the same connection stays as it is: it answered more than one Reregister.
        """
        refusal = self._refusal(message)
        if refusal is not None:
            return refusal
        known = self._by_instance.get(message.instance_id)
        if known is not None and known.identity == identity:
            self.heard(known)
            return None
        if known is not None:
            known.identity = identity
        for worker in self.workers():
            if worker.worker_id == message.worker_id or worker is known:
                self._lose(worker)
        self._by_instance[message.instance_id] = Worker(
            identity=identity,
            worker_id=message.worker_id,
            instance_id=message.instance_id,
            role=message.role,
            model=message.model,
            max_batch=message.max_batch,
            pid=message.pid,
            peer_address=message.peer_address,
            last_heard_s=self._clock(),
        )
        self._update_model(message)
        return None

    def heartbeat(self, identity: bytes, instance_id: str, load: WorkerLoad) -> bool:
        """False when the instance is not known: it must register again.

        That is also so for a known instance over a new connection. What was under way on the old one may be lost in
        either direction, so its sequences are given up, and the worker starts clean.
        """
        worker = self._by_instance.get(instance_id)
        if worker is None:
            return False
        if worker.identity != identity:
            worker.identity = identity  # where it can be told to abort them
            self._lose(worker)
            return False
        self.heard(worker)
        worker.load = load
        return True

    def heard(self, worker: Worker) -> None:
        worker.last_heard_s = self._clock()

    def expire(self) -> None:
        """Lose workers that have been silent for too long."""
        oldest = self._clock() - self._timeout_s
        for worker in self.workers():
            if worker.last_heard_s < oldest:
                self._lose(worker)

    def lose(self, worker: Worker) -> None:
        """Its connection is gone. Does nothing for an instance that is lost already."""
        if self._by_instance.get(worker.instance_id) is worker:
            self._lose(worker)

    def lose_process(self, pid: int, worker_id: str | None) -> None:
        """A supervisor saw the process end. Process ids are unique per host only, hence the name where it is known."""
        for worker in self.workers():
            if worker.pid == pid and worker_id in (None, worker.worker_id):
                self._lose(worker)

    def take_lost(self) -> list[Worker]:
        lost, self._lost = self._lost, []
        return lost

    def heartbeat_ages(self) -> dict[str, float]:
        """Seconds since each worker was last heard, by worker_id."""
        now = self._clock()
        return {worker.worker_id: now - worker.last_heard_s for worker in self.workers()}

    def _refusal(self, message: Register) -> str | None:
        if message.protocol != PROTOCOL_VERSION:
            return (
                f"{message.worker_id} speaks protocol {message.protocol}, this router {PROTOCOL_VERSION}; "
                "run the same version of llmserve everywhere"
            )
        if self.model is None or not self._by_instance:
            return None  # the first worker decides what the cluster serves
        if message.model.fingerprint != self.model.fingerprint:
            return (
                f"{message.worker_id} serves another checkpoint ({message.model.name}) than the cluster "
                f"({self.model.name}); stop the other workers first, or give this one the same checkpoint"
            )
        if message.model.name != self.model.name:
            return (
                f"{message.worker_id} calls the model {message.model.name!r}, the cluster {self.model.name!r}; "
                "give all workers the same --served-model-name"
            )
        return None

    def _lose(self, worker: Worker) -> None:
        del self._by_instance[worker.instance_id]
        self._lost.append(worker)

    def _update_model(self, message: Register) -> None:
        """Requests are bounded by the decoder with the shortest context; a prefiller refuses by itself."""
        decoders = [worker.model for worker in self.workers() if worker.decodes]
        self.model = min(decoders, key=lambda model: model.max_model_len) if decoders else self.model or message.model
