"""A worker whose model is a clock: every step takes the same time and draws the same token. For benchmarks only.

Everything else is the real thing: scheduler, pages, hand-off with real page writes, messages, router, HTTP.
"""

from __future__ import annotations

import os
import time

from llmserve.config import WorkerConfig, resolve_model_path
from llmserve.engine.loading import (
    LoadedEngine,
    assemble,
    kv_layout,
    model_info,
    open_transfer_engine,
)
from llmserve.engine.model_runner import LayerHook, StepResult
from llmserve.engine.sampler import SampledToken
from llmserve.engine.scheduler import StepPlan
from llmserve.engine.worker import main
from llmserve.models.config import Qwen3MoeConfig

STEP_S = float(os.environ.get("LLMSERVE_BENCH_STEP_MS", "20")) / 1e3
TOKEN_ID = 300


class FixedTimeRunner:
    """Sleeps until STEP_S after the step's start, then "draws" one token for each sequence that samples."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.layer_hook: LayerHook | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        deadline = time.perf_counter() + STEP_S
        for layer in range(self.num_layers):
            if self.layer_hook is not None:
                self.layer_hook(plan, layer)
        time.sleep(max(0.0, deadline - time.perf_counter()))
        result = StepResult()
        for item in plan.items:
            if item.sample:
                result.sampled[item.sequence] = SampledToken(token_id=TOKEN_ID, logprob=None, error=None)
        return result


def load_fixed_time(config: WorkerConfig, instance_id: str) -> LoadedEngine:
    import torch

    path = resolve_model_path(config.model)
    model = Qwen3MoeConfig.from_folder(path)
    layout = kv_layout(config, model, torch.float32)
    transfer = open_transfer_engine(config, layout, instance_id)
    runner = FixedTimeRunner(layout.num_layers)

    def set_layer_hook(hook: LayerHook) -> None:
        runner.layer_hook = hook

    return assemble(config, model_info(config, path, model, layout), layout, transfer, runner, set_layer_hook)


if __name__ == "__main__":
    main(load_fixed_time)
