"""From a WorkerConfig to an engine that can run: checkpoint, KV pools in registered memory, page pool, core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from llmserve.config import WorkerConfig, resolve_model_path
from llmserve.control.messages import ModelInfo
from llmserve.engine.core import CoreLimits, EngineCore, Runner
from llmserve.engine.model_runner import LayerHook, ModelRunner
from llmserve.engine.page_pool import PagePool
from llmserve.errors import ConfigError
from llmserve.models.batch import KVCache
from llmserve.models.checkpoint import fingerprint, load_model
from llmserve.models.config import Qwen3MoeConfig
from llmserve.text.tokenizer import read_eos_token_ids, read_vocab_size
from llmserve.transfer.engine import TransferEngine, create_transfer_engine
from llmserve.transfer.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class LoadedEngine:
    """What a worker needs. `transfer` is None for a unified worker: it hands nothing over."""

    core: EngineCore
    layout: KVLayout
    transfer: TransferEngine | None
    set_layer_hook: Callable[[LayerHook], None]
    close: Callable[[], None]


def load_engine(config: WorkerConfig, instance_id: str) -> LoadedEngine:
    """Load the checkpoint and lay out its KV cache. Raises CheckpointError or ConfigError."""
    torch.set_num_threads(config.threads)
    path = resolve_model_path(config.model)
    device = choose_device(config.device)
    dtype = _compute_dtype(config, device)
    model = load_model(path, device=device, dtype=dtype)
    layout = kv_layout(config, model.config, dtype)
    transfer = open_transfer_engine(config, layout, instance_id)
    kv_cache = allocate_kv_cache(layout, device, transfer)
    info = model_info(config, path, model.config, layout)
    runner = ModelRunner(model, kv_cache, info.vocab_size)

    def set_layer_hook(hook: LayerHook) -> None:
        runner.layer_hook = hook

    return assemble(config, info, layout, transfer, runner, set_layer_hook)


def assemble(
    config: WorkerConfig,
    info: ModelInfo,
    layout: KVLayout,
    transfer: TransferEngine | None,
    runner: Runner,
    set_layer_hook: Callable[[LayerHook], None],
) -> LoadedEngine:
    """Page pool and core around a runner."""
    pool = PagePool(layout.num_pages, layout.page_size, prefix_cache=config.prefix_cache)
    limits = CoreLimits(config.max_batch, config.max_batch_tokens, config.max_waiting)
    core = EngineCore(info, pool, runner, limits)

    def close() -> None:
        if transfer is not None:
            transfer.close()

    return LoadedEngine(core, layout, transfer, set_layer_hook, close)


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' was asked for, but torch sees no GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _compute_dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[config.dtype]


def kv_layout(config: WorkerConfig, model: Qwen3MoeConfig, dtype: torch.dtype) -> KVLayout:
    """The pool's layout; its size from num_pages or from kv_memory_bytes."""
    page_bytes = (
        2 * model.num_hidden_layers * model.num_key_value_heads * config.page_size * model.head_dim * dtype.itemsize
    )
    num_pages = config.num_pages or config.kv_memory_bytes // page_bytes
    if num_pages < 1:
        raise ConfigError(f"kv_memory_bytes must hold at least one page of {page_bytes} bytes")
    return KVLayout(
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=str(dtype).removeprefix("torch."),
        num_pages=num_pages,
    )


def open_transfer_engine(config: WorkerConfig, layout: KVLayout, instance_id: str) -> TransferEngine | None:
    """The memory of a disaggregated worker's KV cache is registered with its transport."""
    if config.role == "unified":
        return None
    return create_transfer_engine(config.transport, config.host, instance_id, layout.region_bytes)


def allocate_kv_cache(layout: KVLayout, device: torch.device, transfer: TransferEngine | None) -> KVCache:
    """K and V pools over registered memory (`[2, layers, pages, heads, page, head_dim]`), or over ordinary memory."""
    dtype = DTYPES[layout.dtype]
    shape = (2, layout.num_layers, layout.num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim)
    if transfer is None:
        region = torch.zeros(shape, dtype=dtype, device=device)
    elif device.type == "cpu":
        region = transfer.memory.view(dtype).view(shape)
    else:
        raise ConfigError("transport: hand-off between GPUs is not available yet; use --unified or --device cpu")
    return KVCache(k=region[0], v=region[1])


def model_info(config: WorkerConfig, path: Path, model: Qwen3MoeConfig, layout: KVLayout) -> ModelInfo:
    limit = min(model.max_position_embeddings, layout.num_pages * layout.page_size)
    if config.max_model_len is not None:
        if config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds {limit}, the smaller of the checkpoint's "
                f"{model.max_position_embeddings} and the KV pool's {layout.num_pages * layout.page_size} tokens"
            )
        limit = config.max_model_len
    return ModelInfo(
        name=config.served_model_name or served_name(config.model, path),
        fingerprint=fingerprint(path),
        vocab_size=min(read_vocab_size(path) or model.vocab_size, model.vocab_size),
        max_model_len=limit,
        eos_token_ids=read_eos_token_ids(path),
    )


def served_name(model: str, path: Path) -> str:
    """What clients put in `model`: the folder's name, or `demo`."""
    return "demo" if model == "demo" else path.resolve().name
