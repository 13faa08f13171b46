"""Scheduler and core: batching, chunking, preemption, limits, aborts; tokens are right and pages come back."""

from __future__ import annotations

import random

import msgspec
import pytest

from llmserve.engine.page_pool import PageState
from llmserve.errors import InvalidRequestError, OverloadedError

from .harness import (
    MODEL,
    PAGE,
    VOCAB,
    ChecksumRunner,
    expected_tokens,
    make_core,
    prompt_of,
    request,
    run_all,
    run_step,
)


def test_batch_and_chunks_give_the_right_tokens() -> None:
    """Prompts longer than the token budget are chunked; decodes of others go on meanwhile."""
    core = make_core(max_batch_tokens=24)
    prompts = {str(i): prompt_of(n, i) for i, n in enumerate((1, 5, 16, 17, 100, 63, 200))}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, max_tokens=12))
    tokens = run_all(core)
    assert tokens == {name: expected_tokens(prompt, 12) for name, prompt in prompts.items()}
    assert isinstance(core.runner, ChecksumRunner) and core.runner.largest_step <= 24


def test_prefix_cache_reuses_pages() -> None:
    core = make_core()
    prompt = prompt_of(100)
    for name in ("first", "second"):
        core.add(request(name, prompt))
        outputs = run_step(core)
        while not outputs:
            outputs = run_step(core)
        assert outputs[0].num_cached_tokens == (0 if name == "first" else 96)
        run_all(core)
    core.add(request("longer", [*prompt, *expected_tokens(prompt, 8), 5]))  # output pages are reused as well
    assert run_all(core)["longer"] == expected_tokens([*prompt, *expected_tokens(prompt, 8), 5], 8)
    assert core.pool.hit_tokens == 96 + 96


def test_salts_do_not_share() -> None:
    """B064: the same prompt under another salt finds nothing; '' is no salt."""
    core = make_core()
    cached = {}
    for name, salt in (("a", "A"), ("b", "B"), ("none", ""), ("a again", "A"), ("none again", "")):
        core.add(request(name, prompt_of(50), salt=salt))
        outputs = run_step(core)
        cached[name] = outputs[0].num_cached_tokens
        run_all(core)
    assert cached == {"a": 0, "b": 0, "none": 0, "a again": 48, "none again": 48}


def test_preemption_gives_the_same_tokens() -> None:
    """Memory for three of six sequences: some are preempted and computed again."""
    core = make_core(num_pages=12, prefix_cache=False)
    prompts = {str(i): prompt_of(30, i) for i in range(6)}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, max_tokens=40))
    tokens = run_all(core)
    assert tokens == {name: expected_tokens(prompt, 40) for name, prompt in prompts.items()}
    assert core.scheduler.num_preemptions > 0
    assert core.pool.counts()[PageState.FREE] == 12


def test_a_prompt_that_never_fits_is_refused_and_blocks_nobody() -> None:
    """B040: the long one is refused at once; the short one behind it answers."""
    core = make_core()
    with pytest.raises(InvalidRequestError, match="400 must also hold") as refused:
        core.add(request("long", prompt_of(400)))
    assert refused.value.code == "context_length_exceeded"
    core.add(request("short", prompt_of(3)))
    assert run_all(core)["short"] == expected_tokens(prompt_of(3), 8)


def test_generation_ends_at_the_context_limit() -> None:
    """B050: up to the very last position, with the right tokens."""
    core = make_core(max_batch_tokens=256)
    core.add(request("x", prompt_of(390), max_tokens=None))  # type: ignore[arg-type]
    outputs = []
    while core.has_work():
        outputs += run_step(core)
    assert [t for o in outputs for t in o.token_ids] == expected_tokens(prompt_of(390), 10)
    assert outputs[-1].finish_reason == "length"


def test_a_full_queue_refuses() -> None:
    core = make_core(max_waiting=2)
    for name in "ab":
        core.add(request(name, prompt_of(3)))
    with pytest.raises(OverloadedError, match="limit"):
        core.add(request("c", prompt_of(3)))
    assert sorted(run_all(core)) == ["a", "b"]


def test_wrong_requests_touch_nobody() -> None:
    """B035, B038: an error that names the field, and the others go on."""
    core = make_core()
    core.add(request("good", prompt_of(20)))
    for bad, field in (
        (request("empty", []), "prompt"),
        (request("range", [VOCAB]), "prompt"),
        (request("negative", [-1]), "prompt"),
        (request("good", [1]), "request_id"),
        (request("bias", [1], logit_bias={99_999_999: -100.0}), "logit_bias"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            core.add(bad)
        assert error.value.param == field
    assert run_all(core) == {"good": expected_tokens(prompt_of(20), 8)}


def test_stop_token_and_ignore_eos() -> None:
    prompt = prompt_of(9)
    tokens = expected_tokens(prompt, 8)
    model = msgspec.structs.replace(MODEL, eos_token_ids=[tokens[4]])
    core = make_core(model=model)
    core.add(request("eos", prompt))
    core.add(request("ignored", prompt, ignore_eos=True))
    core.add(request("stop id", prompt, stop_token_ids=[tokens[2]]))
    assert run_all(core) == {"eos": tokens[:5], "ignored": tokens, "stop id": tokens[:3]}


def test_abort_frees_pages_at_once() -> None:
    core = make_core(prefix_cache=False)
    core.add(request("a", prompt_of(100), max_tokens=50))
    core.add(request("b", prompt_of(10), max_tokens=5))
    run_step(core)
    plan, _ = core.schedule()
    result = core.execute(plan)
    core.abort("a")  # while a step with it is under way: its pages are still written
    assert core.pool.counts()[PageState.IN_USE] > 1
    core.complete(plan, result)
    core.pool.check()
    assert core.pool.counts()[PageState.IN_USE] == 1
    core.abort("a")
    core.abort("never heard of")
    run_all(core)
    assert core.pool.counts()[PageState.FREE] == 64


def test_one_row_fails_alone() -> None:
    """B047: NaN logits of one row are an error of that row."""
    core = make_core()
    assert isinstance(core.runner, ChecksumRunner)
    core.runner.nan_requests.add("bad")
    core.add(request("bad", prompt_of(10)))
    core.add(request("good", prompt_of(10, 1)))
    outputs = run_step(core)
    bad = next(o for o in outputs if o.request_id == "bad")
    assert bad.finish_reason == "error" and bad.error is not None and bad.error.code == "invalid_logits"
    assert core.load().counters["invalid_logits_rows"] == 1
    rest = [t for o in outputs if o.request_id == "good" for t in o.token_ids] + run_all(core)["good"]
    assert rest == expected_tokens(prompt_of(10, 1), 8)


def test_a_failed_step_ends_its_sequences_only() -> None:
    core = make_core(max_batch=1)
    core.add(request("a", prompt_of(10)))
    core.add(request("b", prompt_of(10, 1)))
    assert isinstance(core.runner, ChecksumRunner)
    core.runner.broken = True
    plan, _ = core.schedule()
    with pytest.raises(RuntimeError):
        core.execute(plan)
    (failed,) = core.step_failed(plan, RuntimeError("out of memory"))
    assert failed.request_id == "a" and failed.error is not None and "out of memory" in failed.error.message
    assert run_all(core) == {"b": expected_tokens(prompt_of(10, 1), 8)}


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed: int) -> None:
    """Arrivals, aborts and little memory at random: every token right, the ledger sums at every step."""
    chance = random.Random(seed)
    core = make_core(num_pages=chance.choice((26, 40, 80)), max_batch_tokens=chance.choice((16, 40, 128)))
    prompts: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for step in range(150):
        if chance.random() < 0.3 and step < 100:
            name = str(len(prompts))
            shared = prompt_of(chance.choice((0, 16, 40, 64)))
            prompts[name] = shared + prompt_of(chance.randint(1, 60), chance.randint(0, 3))
            core.add(request(name, prompts[name], max_tokens=chance.randint(1, 30), salt=chance.choice(("", "x"))))
        if chance.random() < 0.05 and core.sequences:
            victim = chance.choice(list(core.sequences))
            core.abort(victim)
            aborted.add(victim)
        for output in run_step(core):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        core.pool.check()
    for name, more in run_all(core).items():
        tokens.setdefault(name, []).extend(more)
    for name, prompt in prompts.items():
        got = tokens.get(name, [])
        assert got == expected_tokens(prompt, len(got))
        assert got or name in aborted
    assert core.pool.num_available() == core.pool.num_pages


def test_page_count_of_a_sequence() -> None:
    core = make_core(prefix_cache=False)
    core.add(request("a", prompt_of(PAGE), max_tokens=2))
    run_step(core)
    assert core.pool.counts()[PageState.IN_USE] == 1
    run_step(core)
    assert core.pool.counts()[PageState.IN_USE] == 0
