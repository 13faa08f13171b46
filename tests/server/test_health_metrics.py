"""Probes and /metrics."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

import llmserve
from llmserve.server.metrics import TOKEN_SECONDS, Histogram
from tests.fakes import FakeWorker

from .site import Site, fails, says


def samples(site: Site) -> dict[tuple[str, ...], float]:
    """All samples by (name, label values in alphabetical order); parsing also proves that the text is valid."""
    text = site.client.get("/metrics").text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def lone_site():  # type: ignore[no-untyped-def]
    site = Site()
    yield site
    site.close()


def test_health_follows_progress(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    response = site.client.get("/health")
    assert response.status_code == 200
    worker = next(w for w in response.json()["workers"] if w["worker_id"] == "prefill-0")
    assert {"role", "pid", "running", "waiting", "free_pages", "cached_pages", "total_pages"} <= worker.keys()
    monkeypatch.setattr(site.backend, "is_progressing", False)
    stalled = site.client.get("/health")
    assert stalled.status_code == 503 and len(stalled.json()["workers"]) == 2
    assert site.client.get("/ready").status_code == 200


def test_ready_ping_version(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.client.get("/ready").json() == {"ready": True}
    monkeypatch.setattr(site.backend, "is_ready", False)
    assert site.client.get("/ready").status_code == 503
    assert site.client.get("/ping").status_code == 200
    assert site.client.get("/version").json() == {"version": llmserve.__version__}


def test_models(site: Site) -> None:
    (card,) = site.client.get("/v1/models").json()["data"]
    assert card["id"] == "demo" and card["object"] == "model" and card["max_model_len"] == 512
    assert site.client.get("/v1/models/demo").json() == card
    assert site.client.get("/v1/models/a/b").status_code == 404


def test_requests_are_counted(lone_site: Site) -> None:
    site = lone_site
    site.backend.script = says("one two three", eos=False)
    whole = site.complete(n=2, max_tokens=3).json()["usage"]
    site.complete_stream(max_tokens=2)
    site.backend.script = fails(503, "gone", after=1)
    site.chat()
    found = samples(site)
    assert found["vllm:generation_tokens_total", "demo"] == whole["completion_tokens"] + 2 + 1
    assert found["vllm:prompt_tokens_total", "demo"] == 3 * whole["prompt_tokens"]
    assert found["vllm:request_success_total", "demo", "length"] == 3
    assert found["vllm:request_success_total", "demo", "error"] == 1
    assert found["vllm:time_to_first_token_seconds_count", "demo"] == 4
    assert found["vllm:inter_token_latency_seconds_count", "demo"] == 2 + 2 + 1
    assert found["vllm:e2e_request_latency_seconds_count", "demo"] == 3
    assert found["llmserve:http_requests_total", "/v1/completions", "2xx"] == 2
    assert found["llmserve:http_requests_total", "/v1/chat/completions", "5xx"] == 1


def test_workers_are_shown(lone_site: Site) -> None:
    worker = FakeWorker("decode-0", "decode")
    worker.load.running, worker.load.waiting = 3, 2
    worker.load.total_pages, worker.load.free_pages, worker.load.cached_pages = 10, 4, 1
    worker.load.quarantined_pages = 1
    worker.load.counters = {
        "prefix_cache_queries": 100, "prefix_cache_hits": 40, "kv_transfers": 7, "kv_transfer_failures": 1,
        "kv_transfer_bytes": 4096, "not_known": 1,
    }  # fmt: skip
    lone_site.backend.worker_list = [worker]
    found = samples(lone_site)
    assert found["vllm:num_requests_running", "decode-0", "demo"] == 3
    assert found["vllm:num_requests_waiting", "decode-0", "demo"] == 2
    assert found["vllm:kv_cache_usage_perc", "decode-0", "demo"] == 0.5
    assert found["vllm:prefix_cache_queries_total", "decode-0", "demo"] == 100
    assert found["vllm:prefix_cache_hits_total", "decode-0", "demo"] == 40
    assert found["llmserve:kv_transfers_total", "decode-0", "demo"] == 7
    assert found["llmserve:kv_transfer_failures_total", "decode-0", "demo"] == 1
    assert found["llmserve:kv_transfer_bytes_total", "decode-0", "demo"] == 4096
    assert found["llmserve:kv_pages_quarantined", "decode-0", "demo"] == 1
    assert found["llmserve:workers", "decode"] == 1 and found["llmserve:workers", "prefill"] == 0
    assert not any("not_known" in name for name, *_ in found)


def test_user_text_never_becomes_a_label(lone_site: Site) -> None:
    """B091: any number of different models, paths, methods and headers leaves the number of series as it was."""
    site = lone_site

    def poke(number: int) -> None:
        assert site.chat(model=f"model-{number}", user=f"user-{number}").status_code == 404
        site.client.get(f"/path-{number}", headers={f"x-{number}": "1"})
        site.client.request(f"METHOD{number % 3}", "/v1/models")
        site.client.get(f"/v1/models/{number}")

    poke(0)
    samples(site)
    before = set(samples(site))
    for number in range(1, 50):
        poke(number)
    assert set(samples(site)) == before
    assert "model-7" not in site.client.get("/metrics").text


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(value)
    (count, total, *_), buckets = (4, 3.65), {}
    for sample in histogram.family("h", "text", "m").samples:
        if sample.name == "h_bucket":
            buckets[sample.labels["le"]] = sample.value
        else:
            assert sample.value == pytest.approx(count if sample.name == "h_count" else total)
    assert buckets == {"0.1": 2, "1.0": 3, "+Inf": 4}


def test_observing_is_cheap() -> None:
    """Under 2 us a value; the limit here is loose, for machines that are busy."""
    histogram = Histogram(TOKEN_SECONDS)
    started = time.process_time()
    for _ in range(20_000):
        histogram.observe(0.02)
    assert (time.process_time() - started) / 20_000 < 20e-6
