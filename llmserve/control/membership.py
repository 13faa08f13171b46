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
        """Take a worker in, or say why not. A new instance of a known worker_id replaces the old one at once."""
        if message.protocol != PROTOCOL_VERSION:
            return f"protocol {message.protocol} of {message.worker_id}, this router speaks {PROTOCOL_VERSION}"
        if self.model is not None and message.model.fingerprint != self.model.fingerprint and self._by_instance:
            return (
                f"{message.worker_id} serves another checkpoint ({message.model.name}) than the cluster "
                f"({self.model.name})"
            )
        for worker in self.workers():
            if worker.worker_id == message.worker_id and worker.instance_id != message.instance_id:
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

    def heartbeat(self, instance_id: str, load: WorkerLoad) -> bool:
        """False when the instance is not known: it must register again."""
        worker = self._by_instance.get(instance_id)
        if worker is None:
            return False
        worker.last_heard_s = self._clock()
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

    def lose_pid(self, pid: int) -> None:
        """A supervisor saw the process end."""
        for worker in self.workers():
            if worker.pid == pid:
                self._lose(worker)

    def take_lost(self) -> list[Worker]:
        lost, self._lost = self._lost, []
        return lost

    def _lose(self, worker: Worker) -> None:
        del self._by_instance[worker.instance_id]
        self._lost.append(worker)

    def _update_model(self, message: Register) -> None:
        """Requests are bounded by the decoder with the shortest context; a prefiller refuses by itself."""
        decoders = [worker.model for worker in self.workers() if worker.decodes]
        self.model = min(decoders, key=lambda model: model.max_model_len) if decoders else self.model or message.model
