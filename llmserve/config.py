"""Every option in one place: what a worker, the router and the server can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.errors import ConfigError

ROLES = ("prefill", "decode", "unified")
TRANSPORTS = ("shared_memory", "tcp")
DEMO_MODEL_PATH = Path(__file__).parent / "demo"


def resolve_model_path(model: str) -> Path:
    """A checkpoint folder, or the word `demo` for the embedded model."""
    path = DEMO_MODEL_PATH if model == "demo" else Path(model)
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {model!r} is neither 'demo' nor a folder with a config.json")
    return path


@dataclass(kw_only=True)
class WorkerConfig:
    """One engine process."""

    model: str
    role: str = "unified"
    worker_id: str = "unified-0"
    router_address: str = ""  # ZeroMQ address that the router is bound to
    host: str = "127.0.0.1"  # where this worker listens for peers
    device: str = "auto"  # "auto" | "cpu" | "cuda"
    dtype: str = "auto"  # computation: "auto" (float32 on CPU, the checkpoint's on a GPU) | "float32" | "bfloat16"
    page_size: int = 64
    num_pages: int | None = None  # None: from kv_memory_bytes
    kv_memory_bytes: int = 256 * 1024 * 1024
    max_model_len: int | None = None  # None: the checkpoint's, capped by the pool
    max_batch: int = 64  # sequences that decode together
    max_batch_tokens: int = 512  # token budget of a step: prefill is chunked to it
    max_waiting: int = 1024  # sequences queued in one worker before new ones are refused
    prefix_cache: bool = True
    transport: str = "shared_memory"
    on_prefill_failure: str = "recompute"  # "recompute" on the decoder | "error"
    prefill_timeout_s: float = 60.0
    peer_timeout_s: float = 2.0  # silence after which a peer counts as dead
    threads: int = 0  # CPU threads for the model; 0: cores / 2, at least 1
    served_model_name: str = ""
    curve_dir: str = ""  # folder of CURVE keys; without it everything stays on loopback

    def __post_init__(self) -> None:
        _one_of("role", self.role, ROLES)
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("on_prefill_failure", self.on_prefill_failure, ("recompute", "error"))
        _one_of("page_size", self.page_size, (16, 32, 64, 128))
        for name in ("max_batch", "max_batch_tokens", "max_waiting", "kv_memory_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_batch_tokens", self.max_batch_tokens, self.page_size)
        if self.threads == 0:
            self.threads = max(1, (os.cpu_count() or 2) // 2)


@dataclass(kw_only=True)
class RouterConfig:
    """The router: where workers connect, and when one counts as dead."""

    bind: str = "tcp://127.0.0.1:*"
    heartbeat_interval_s: float = 0.5
    worker_timeout_s: float = 2.5
    no_worker_timeout_s: float = 4.0  # how long a request may wait for a worker to (re)join
    curve_dir: str = ""
    max_pending: int = 4096  # sequences in flight over all workers before new ones are refused


@dataclass(kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    api_keys: list[str] = field(default_factory=list)
    max_body_bytes: int = 16 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_timeout_s: float = 60.0
    max_prompts_per_request: int = 128  # /v1/completions: prompts x n
    escape_special_tokens: bool = True  # user text never becomes control tokens
    log_level: str = "warning"


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
