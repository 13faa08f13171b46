"""Real scheduler, pages, hand-off and messages around a model that is a checksum.

The model writes each token's id into the KV pages and derives the next token from what it reads there: a page that is
wrong, missing or reused too early gives a wrong token.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from llmserve.config import RouterConfig, WorkerConfig
from llmserve.control.messages import GenerateRequest, ModelInfo, TokenOutput
from llmserve.control.router import Router
from llmserve.engine.core import CoreLimits, EngineCore
from llmserve.engine.loading import LoadedEngine, allocate_kv_cache, assemble, open_transfer_engine
from llmserve.engine.model_runner import LayerHook, StepResult
from llmserve.engine.page_pool import PagePool
from llmserve.engine.sampler import SampledToken
from llmserve.engine.scheduler import StepPlan
from llmserve.engine.worker import Worker
from llmserve.models.batch import KVCache
from llmserve.sampling_params import SamplingParams
from llmserve.transfer.layout import KVLayout

VOCAB = 997
PAGE = 16
LAYERS = 3
MODEL = ModelInfo(name="checksum", fingerprint="f", vocab_size=VOCAB, max_model_len=400, eos_token_ids=[VOCAB - 1])


def layout(num_pages: int) -> KVLayout:
    return KVLayout(num_layers=LAYERS, num_kv_heads=2, head_dim=2, page_size=PAGE, dtype="float32", num_pages=num_pages)


def next_token(context: list[int]) -> int:
    """What the model says after a context; never the end token."""
    total = 0
    for position, token in enumerate(context):
        total = (total * 31 + token * (position + 1)) % 1_000_003
    return total % (VOCAB - 1)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class ChecksumRunner:
    """`gate`, when cleared, holds every step; `step_s` is how long one takes; `broken` makes the next step raise."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.layer_hook: LayerHook | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.0
        self.broken = False
        self.nan_requests: set[str] = set()
        self.largest_step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.largest_step = max(self.largest_step, plan.num_tokens)
        if self.broken:
            self.broken = False
            raise RuntimeError("out of memory")
        for layer in range(LAYERS):
            assert self.gate.wait(20), "the test forgot to open the gate"
            for item in plan.items:
                for position in range(item.start, item.start + item.count):
                    page, offset = item.sequence.pages[position // PAGE], position % PAGE
                    for pool in (self.cache.k, self.cache.v):
                        pool[layer, page, :, offset] = float(item.sequence.token_ids[position])
            if self.layer_hook is not None:
                self.layer_hook(plan, layer)
        threading.Event().wait(self.step_s)
        result = StepResult()
        for item in plan.items:
            if item.sample:
                error = "NaN" if item.sequence.request_id in self.nan_requests else None
                result.sampled[item.sequence] = SampledToken(next_token(self._context(item)), error=error)
        return result

    def _context(self, item: object) -> list[int]:
        """The context as the pages hold it: K and V of all layers and heads must agree."""
        end = item.start + item.count  # type: ignore[attr-defined]
        pages = item.sequence.pages  # type: ignore[attr-defined]
        both = torch.stack((self.cache.k[:, pages], self.cache.v[:, pages]))  # [2, layers, pages, heads, page, dim]
        both = both.permute(2, 4, 0, 1, 3, 5).flatten(2).flatten(0, 1)[:end]  # [tokens, copies]
        assert bool((both == both[:, :1]).all()), "the copies of a token differ"
        return both[:, 0].long().tolist()


def make_core(num_pages: int = 64, *, prefix_cache: bool = True, model: ModelInfo = MODEL, **limits: int) -> EngineCore:
    """An engine without processes."""
    cache = allocate_kv_cache(layout(num_pages), torch.device("cpu"), None)
    pool = PagePool(num_pages, PAGE, prefix_cache=prefix_cache)
    settings = {"max_batch": 8, "max_batch_tokens": 64, "max_waiting": 100, **limits}
    return EngineCore(model, pool, ChecksumRunner(cache), CoreLimits(**settings))  # type: ignore[arg-type]


def request(
    request_id: str, prompt: list[int], max_tokens: int = 8, salt: str = "", **params: object
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, params=sampling, cache_salt=salt)


def run_step(core: EngineCore) -> list[TokenOutput]:
    plan, handoffs = core.schedule()
    assert not handoffs
    return core.complete(plan, core.execute(plan)) if plan.items else core.take_outbox()


def run_all(core: EngineCore, limit: int = 2000) -> dict[str, list[int]]:
    """Step until idle; returns the tokens of each request, after a check of the page ledger at each step."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not core.has_work():
            return tokens
        for output in run_step(core):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        core.pool.check()
    raise AssertionError("the engine does not come to an end")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 131 + 3) % VOCAB for i in range(length)]


# ---------------------------------------------------------------- a cluster in one loop


class Cluster:
    """A router and workers as tasks of the test's own loop, so that a test can reach into them."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.workers: dict[str, Worker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, role: str, number: int = 0, num_pages: int = 64, **options: object) -> Worker:
        worker_id = f"{role}-{number}"
        config = WorkerConfig(
            model="checksum", role=role, worker_id=worker_id, router_address=self.router.address, page_size=PAGE,
            num_pages=num_pages, max_batch_tokens=32, peer_timeout_s=0.6, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        worker = Worker(config, load_checksum)
        self.workers[worker_id] = worker
        self.tasks[worker_id] = asyncio.create_task(worker.run())
        await until(lambda: any(w.instance_id == worker.instance_id for w in self.router.workers()))
        return worker

    async def kill(self, worker_id: str) -> None:
        """The nearest thing to SIGKILL that a task allows: it ends at once and says nothing."""
        self.tasks[worker_id].cancel()
        await asyncio.gather(self.tasks[worker_id], return_exceptions=True)

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        return [output async for output in self.router.submit(request)]

    def runner(self, worker_id: str) -> ChecksumRunner:
        return self.workers[worker_id].core.runner  # type: ignore[return-value]

    async def all_pages_free(self, timeout_s: float = 2.0) -> None:
        def free() -> bool:
            pools = [worker.core.pool for worker in self.workers.values()]
            return all(pool.num_available() == pool.num_pages for pool in pools)

        await until(free, timeout_s)
        for worker in self.workers.values():
            worker.core.pool.check()


def load_checksum(config: WorkerConfig, instance_id: str) -> LoadedEngine:
    assert config.num_pages is not None
    shape = layout(config.num_pages)
    transfer = open_transfer_engine(config, shape, instance_id)
    runner = ChecksumRunner(allocate_kv_cache(shape, torch.device("cpu"), transfer))
    info = MODEL
    if config.max_model_len is not None:
        info = ModelInfo(
            **{name: getattr(MODEL, name) for name in MODEL.__struct_fields__} | {"max_model_len": config.max_model_len}
        )

    def set_layer_hook(hook: LayerHook) -> None:
        runner.layer_hook = hook

    return assemble(config, info, shape, transfer, runner, set_layer_hook)


@asynccontextmanager
async def cluster(**options: float) -> AsyncIterator[Cluster]:
    router = Router(replace(RouterConfig(heartbeat_interval_s=0.05, worker_timeout_s=0.6), **options))  # type: ignore[arg-type]
    await router.start()
    running = Cluster(router)
    try:
        yield running
    finally:
        for task in running.tasks.values():
            task.cancel()
        await asyncio.gather(*running.tasks.values(), return_exceptions=True)
        await router.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition does not come true"
        await asyncio.sleep(0.005)


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
