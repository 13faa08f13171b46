"""/metrics: Prometheus text. Names `vllm:*` where the meaning is the same as there, `llmserve:*` for the rest.

Every label value comes from a fixed set, from the configuration or from a worker's id: never from a request. What the
server sees itself (tokens, latencies) is counted here; what workers count (pages, transfers, prefix cache) arrives with
their heartbeats and is read when /metrics is asked. A worker's counters start again at 0 when it restarts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from llmserve.config import ROLES
from llmserve.control.backend import Backend, WorkerStatus

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
FINISH_REASONS = ("stop", "length", "abort", "error")
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"})

# A worker's counter -> (metric, help). Names that are not here are not exported.
WORKER_COUNTERS = {
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("vllm:num_preemptions", "Sequences that were evicted and computed again."),
    "kv_transfers": ("llmserve:kv_transfers", "KV caches received from prefillers."),
    "kv_transfer_failures": ("llmserve:kv_transfer_failures", "Hand-offs that failed or were cancelled."),
    "kv_transfer_bytes": ("llmserve:kv_transfer_bytes", "Bytes of KV cache received from prefillers."),
    "invalid_logits_rows": ("llmserve:invalid_logits_rows", "Sequences that failed because logits were not finite."),
}
WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerStatus], float]]] = {
    "vllm:num_requests_running": ("Sequences in the batch.", lambda worker: worker.load.running),
    "vllm:num_requests_waiting": ("Sequences not yet admitted.", lambda worker: worker.load.waiting),
    "vllm:kv_cache_usage_perc": ("Share of KV pages in use, 0 to 1.", lambda worker: _page_usage(worker)),
    "llmserve:queued_prompt_tokens": ("Prompt tokens to compute.", lambda worker: worker.load.queued_tokens),
    "llmserve:kv_pages_quarantined": (
        "Pages of cancelled transfers that are not drained.",
        lambda worker: worker.load.quarantined_pages,
    ),
    "llmserve:worker_stalled_seconds": ("Time with work but no step.", lambda worker: worker.load.stalled_s),
}


class Histogram:
    """A histogram that costs well under a microsecond per value: the server runs on one thread and needs no lock."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([model], buckets, self._sum)
        return family


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of its own."""

    def __init__(self, backend: Backend, model_name: Callable[[], str]) -> None:
        self.time_to_first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.time_per_output_token = Histogram(TOKEN_SECONDS)
        self.request_latency = Histogram(REQUEST_SECONDS)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self._http: dict[tuple[str, str], int] = {}
        self._backend = backend
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_finished(self, reason: str) -> None:
        self.finished[reason if reason in self.finished else "error"] += 1

    def count_http(self, scope: Scope, status: int) -> None:
        """One answered request, under a path and status class of a fixed set."""
        path = scope["path"] if scope["path"] in PATHS else "other"
        key = (path, f"{status // 100}xx")
        self._http[key] = self._http.get(key, 0) + 1

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        model = self._model_name()
        yield from self._latencies(model)
        yield _counter("vllm:prompt_tokens", "Prompt tokens of answered sequences.", model, self.prompt_tokens)
        yield _counter("vllm:generation_tokens", "Generated tokens.", model, self.generation_tokens)
        yield from self._outcomes(model)
        yield from self._worker_metrics(model, self._backend.workers())

    def _latencies(self, model: str) -> Iterator[Metric]:
        yield self.time_to_first_token.family(
            "vllm:time_to_first_token_seconds", "From the request to the first generated token.", model
        )
        yield self.inter_token_latency.family(
            "vllm:inter_token_latency_seconds", "Between two generated tokens of a sequence.", model
        )
        yield self.time_per_output_token.family(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a whole sequence.", model
        )
        yield self.request_latency.family(
            "vllm:e2e_request_latency_seconds", "From the request to the end of a sequence.", model
        )

    def _outcomes(self, model: str) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "vllm:request_success", "Ended sequences by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([model, reason], count)
        yield finished
        http = CounterMetricFamily("llmserve:http_requests", "Answered HTTP requests.", labels=["path", "status"])
        for (path, status), count in self._http.items():
            http.add_metric([path, status], count)
        yield http

    def _worker_metrics(self, model: str, workers: Sequence[WorkerStatus]) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        for name, (text, value) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for worker in workers:
                gauge.add_metric([model, worker.worker_id], value(worker))
            yield gauge
        for key, (name, text) in WORKER_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for worker in workers:
                if key in worker.load.counters:
                    counter.add_metric([model, worker.worker_id], worker.load.counters[key])
            yield counter
        alive = GaugeMetricFamily("llmserve:workers", "Workers that are registered and alive.", labels=["role"])
        for role in ROLES:
            alive.add_metric([role], sum(worker.role == role for worker in workers))
        yield alive


async def metrics_endpoint(request: Request) -> Response:
    """GET /metrics. Open without an API key: it holds no request data."""
    metrics: ServerMetrics = request.app.state.context.metrics
    return Response(metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


def _counter(name: str, text: str, model: str, value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _page_usage(worker: WorkerStatus) -> float:
    total = worker.load.total_pages
    return (total - worker.load.free_pages - worker.load.cached_pages) / total if total else 0.0
