"""A text pipeline over a scripted backend, and scripts of tokens for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from llmserve.config import DEMO_MODEL_PATH
from llmserve.control.messages import GenerateRequest, ModelInfo, TokenLogprob, TokenOutput
from llmserve.pipeline import CompletedChoice, TextDelta, TextPipeline, TextRequest
from llmserve.sampling_params import SamplingParams
from llmserve.text.tokenizer import Tokenizer
from tests.fakes import Script, ScriptedBackend

TOKENIZER = Tokenizer.from_folder(DEMO_MODEL_PATH)
ID_OF_BYTES = {data: token_id for token_id, data in enumerate(TOKENIZER.byte_table)}
END = TOKENIZER.eos_token_ids[0]
MODEL = ModelInfo(name="m", fingerprint="f", vocab_size=8192, max_model_len=64, eos_token_ids=TOKENIZER.eos_token_ids)
TIMEOUT_S = 10.0
PROMPT = [5, 6, 7]


def outputs(
    token_ids: list[int], *, per_output: int = 1, finish: str | None = "length", **first: Any
) -> list[TokenOutput]:
    """Outputs of `per_output` tokens with a log-probability each; the last has the finish reason."""
    chunks = [token_ids[i : i + per_output] for i in range(0, len(token_ids), per_output)]
    result = [
        TokenOutput(request_id="", token_ids=chunk, logprobs=[TokenLogprob(token_id=i, logprob=-0.5) for i in chunk])
        for chunk in chunks
    ]
    for name, value in first.items():
        setattr(result[0], name, value)
    result[-1].finish_reason = finish
    if finish == "stop":
        result[-1].stop_token_id = token_ids[-1]
    return result


def byte_ids(data: bytes) -> list[int]:
    """One token per byte: the finest way to cut a text."""
    return [ID_OF_BYTES[bytes([byte])] for byte in data]


def pipeline_of(script: Script | list[TokenOutput]) -> tuple[TextPipeline, ScriptedBackend]:
    backend = ScriptedBackend(MODEL, script if callable(script) else lambda _: script)
    return TextPipeline(backend, TOKENIZER), backend


def request(prompt: list[int] | None = None, cache_salt: str = "", **params: Any) -> TextRequest:
    return TextRequest(PROMPT if prompt is None else prompt, SamplingParams(**params), "r", cache_salt)


async def collect(script: Script | list[TokenOutput], **params: Any) -> tuple[list[TextDelta], ScriptedBackend]:
    pipeline, backend = pipeline_of(script)

    async def drain() -> list[TextDelta]:
        return [delta async for delta in pipeline.generate(request(**params))]

    return await asyncio.wait_for(drain(), TIMEOUT_S), backend


async def complete(script: Script | list[TokenOutput], **params: Any) -> tuple[list[CompletedChoice], ScriptedBackend]:
    pipeline, backend = pipeline_of(script)
    return await asyncio.wait_for(pipeline.generate_all(request(**params)), TIMEOUT_S), backend


async def endless(_: GenerateRequest) -> AsyncIterator[TokenOutput]:
    while True:
        await asyncio.sleep(0.001)
        yield TokenOutput(request_id="", token_ids=byte_ids(b"x"))
