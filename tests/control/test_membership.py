"""Who is a member: registration, replacement, silence, refusal. No sockets; the clock is the test's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmserve.control.membership import Membership
from llmserve.control.messages import PROTOCOL_VERSION, ModelInfo, Register, WorkerLoad

MODEL = ModelInfo(name="m", fingerprint="f", vocab_size=100, max_model_len=50, eos_token_ids=[1])


class Cluster:
    """A membership with a timeout of 10 s and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.members = Membership(lambda: self.now, timeout_s=10.0)

    def register(self, worker_id: str, instance_id: str, identity: bytes = b"", **fields: Any) -> str | None:
        message = Register(
            protocol=PROTOCOL_VERSION, worker_id=worker_id, instance_id=instance_id, role="decode", model=MODEL,
            max_batch=8, pid=7,
        )  # fmt: skip
        return self.members.register(identity or instance_id.encode(), msgspec.structs.replace(message, **fields))

    def beat(self, instance_id: str, identity: bytes = b"") -> bool:
        return self.members.heartbeat(identity or instance_id.encode(), instance_id, WorkerLoad(running=3))

    def alive(self) -> list[str]:
        return [worker.instance_id for worker in self.members.workers()]

    def lost(self) -> list[str]:
        return [worker.instance_id for worker in self.members.take_lost()]


def test_silence_is_death_and_a_heartbeat_after_it_must_register() -> None:
    c = Cluster()
    c.register("a", "a1")
    c.register("b", "b1")
    c.now = 9.0
    assert c.beat("a1")
    assert c.members.heartbeat_ages() == {"a": 0.0, "b": 9.0}
    c.now = 10.5
    c.members.expire()
    assert (c.alive(), c.lost()) == (["a1"], ["b1"])
    assert not c.beat("b1")
    assert c.register("b", "b1") is None and c.beat("b1")
    assert c.lost() == []


def test_a_new_instance_replaces_the_old_at_once() -> None:
    """B076, B077."""
    c = Cluster()
    c.register("a", "old")
    c.register("b", "other")
    c.register("a", "new")
    assert (sorted(c.alive()), c.lost()) == (["new", "other"], ["old"])
    assert not c.beat("old")


def test_registering_twice_changes_nothing() -> None:
    c = Cluster()
    c.register("a", "a1")
    (before,) = c.members.workers()
    c.register("a", "a1")
    assert c.members.workers() == [before] and c.lost() == []


@pytest.mark.parametrize("by", ["heartbeat", "register"])
def test_another_connection_of_an_instance_starts_clean(by: str) -> None:
    """Messages of the broken connection may be lost: what ran over it must not be waited for."""
    c = Cluster()
    c.register("a", "a1", b"first connection")
    (before,) = c.members.workers()
    if by == "heartbeat":
        assert not c.beat("a1", b"second connection")
    assert c.register("a", "a1", b"second connection") is None
    assert c.members.take_lost() == [before]
    assert before.identity == b"second connection"  # where its sequences can be aborted
    (after,) = c.members.workers()
    assert after is not before


def test_a_process_id_counts_with_its_name() -> None:
    """In containers, workers of different hosts have the same process id."""
    c = Cluster()
    c.register("a", "a1")
    c.register("b", "b1")
    c.members.lose_process(7, "a")
    assert (c.alive(), c.lost()) == (["b1"], ["a1"])
    c.members.lose_process(8, "b")
    assert c.alive() == ["b1"]
    c.members.lose_process(7, None)
    assert c.alive() == []


def test_losing_twice_is_losing_once() -> None:
    c = Cluster()
    c.register("a", "a1")
    (worker,) = c.members.workers()
    c.members.lose(worker)
    c.members.lose(worker)
    assert c.lost() == ["a1"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol": 99}, "b speaks protocol 99"),
        ({"model": msgspec.structs.replace(MODEL, fingerprint="g")}, "another checkpoint"),
        ({"model": msgspec.structs.replace(MODEL, name="n")}, "--served-model-name"),
    ],
)
def test_refusal_says_why(fields: dict[str, Any], reason: str) -> None:
    c = Cluster()
    c.register("a", "a1")
    refusal = c.register("b", "b1", **fields)
    assert refusal is not None and reason in refusal
    assert c.alive() == ["a1"]


def test_an_empty_cluster_may_change_its_model() -> None:
    c = Cluster()
    c.register("a", "a1")
    c.now = 11.0
    c.members.expire()
    other = msgspec.structs.replace(MODEL, fingerprint="g", name="n")
    assert c.register("a", "a2", model=other) is None
    assert c.members.model == other


def test_the_shortest_decoder_bounds_requests() -> None:
    c = Cluster()
    c.register("p", "p1", role="prefill", model=msgspec.structs.replace(MODEL, max_model_len=10))
    c.register("a", "a1")
    c.register("b", "b1", model=msgspec.structs.replace(MODEL, max_model_len=40))
    assert c.members.model is not None and c.members.model.max_model_len == 40
