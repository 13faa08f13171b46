"""The embedded engine on the demo model, in plain code and inside a running event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from llmserve import Engine, SamplingParams
from llmserve.errors import ConfigError, InvalidRequestError

pytestmark = pytest.mark.slow
PASSAGE = "It was a dark night, and the wind came down from the hills with a sound like the sea. " * 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", max_batch_tokens=2048) as engine:
        yield engine


def test_outputs_are_in_the_order_of_the_prompts(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (9, 3, 6)]
    outputs = engine.generate(["The ship", [300, 301], "Once upon a time"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 3, 6]
    assert outputs[1].prompt_token_ids == [300, 301]
    assert engine.generate("The ship", params[0])[0].text == outputs[0].text


def test_chat_ends_by_itself(engine: Engine) -> None:
    output = engine.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0.0, max_tokens=100))
    assert output.outputs[0].finish_reason == "stop"
    assert "demo model" in output.text


async def test_inside_a_running_loop(engine: Engine) -> None:
    """As in a notebook: the blocking call and the stream both work, and agree."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    whole = engine.generate("The old house", params)[0].text
    assert "".join([delta.text async for delta in engine.stream("The old house", params)]) == whole


async def test_leaving_a_stream_frees_its_pages(engine: Engine) -> None:
    async for _ in engine.stream(PASSAGE, SamplingParams(max_tokens=3000, ignore_eos=True)):
        break
    deadline = time.monotonic() + 10
    while any(worker.load.running for worker in engine.cluster.router.workers()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    (worker,) = engine.cluster.router.workers()
    assert worker.load.free_pages + worker.load.cached_pages == worker.load.total_pages


def test_errors_name_the_field(engine: Engine) -> None:
    for prompts, params, field in (
        ("", SamplingParams(), "prompt"),
        ("x", SamplingParams(top_p=2.0), "top_p"),
        (["x", "y"], [SamplingParams()], "params"),
        ("x " * 5000, SamplingParams(), "prompt"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            engine.generate(prompts, params)
        assert error.value.param == field
    with pytest.raises(ConfigError, match="must both be at least 1"):
        Engine("demo", prefill=1)
    with pytest.raises(ConfigError, match="neither 'demo' nor a folder"):
        Engine("/nowhere")


def test_prompt_logprobs_do_not_depend_on_chunks(engine: Engine) -> None:
    """B049: the same values from one chunk and from many, also beside other requests and after a cached prefix."""
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)
    prompts = [PASSAGE + ending for ending in ("The boy", "Nobody", "She")]
    whole = [engine.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    with Engine("demo", max_batch_tokens=64) as chunked:
        together = [output.outputs[0] for output in chunked.generate([*prompts, *prompts], params)]
    for expected, found in zip([*whole, *whole], together, strict=True):
        assert expected.prompt_logprobs is not None and found.prompt_logprobs is not None
        assert expected.prompt_logprobs[0].logprob is None
        assert len(expected.prompt_logprobs) == expected.num_prompt_tokens
        assert found.prompt_logprobs == expected.prompt_logprobs


def test_seeded_sampling_is_the_same_in_any_company(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=42, n=3, ignore_eos=True)
    alone = engine.generate("The ship", params)[0]
    others = SamplingParams(max_tokens=30)
    crowd = engine.generate(["The dog", "The ship", "The sea"], [others, params, others])[1]
    assert [choice.text for choice in alone.outputs] == [choice.text for choice in crowd.outputs]
    assert len({choice.text for choice in alone.outputs}) == 3
