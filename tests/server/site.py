"""A real server on loopback, in a thread of its own, over a scripted backend; and scripts for it."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

import httpx
import openai
import uvloop

from llmserve.config import DEMO_MODEL_PATH, ServerConfig
from llmserve.control.messages import ErrorInfo, GenerateRequest, ModelInfo, TokenLogprob, TokenOutput
from llmserve.pipeline import TextPipeline
from llmserve.server.serve import serve
from llmserve.text.tokenizer import Tokenizer
from tests.fakes import Script, ScriptedBackend

MAX_MODEL_LEN = 512
DEADLINE_S = 10.0
HI = [{"role": "user", "content": "hi"}]


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO_MODEL_PATH)


def demo_model() -> ModelInfo:
    tokenizer = demo_tokenizer()
    return ModelInfo(
        name="demo",
        fingerprint="0123456789abcdef",
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=tokenizer.eos_token_ids,
    )


class Site:
    """`say` sets what the model answers; `requests` and `aborted` are the backend's records."""

    def __init__(self, tokenizer: Tokenizer | None = None, **config: Any) -> None:
        self.tokenizer = tokenizer or demo_tokenizer()
        self.backend = ScriptedBackend(demo_model(), says("ok"))
        self.pipeline = TextPipeline(self.backend, self.tokenizer)
        self.config = ServerConfig(port=0, **config)
        self.port = 0
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(DEADLINE_S)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)

    def close(self) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def reset(self) -> None:
        self.backend.script = says("ok")
        self.backend.requests.clear()
        self.backend.aborted.clear()

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=10)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"model": "demo", "messages": HI, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "demo", "prompt": "hi", **fields})

    def chat_stream(self, **fields: Any) -> list[dict[str, Any]]:
        return events(self.chat(stream=True, **fields))

    def complete_stream(self, **fields: Any) -> list[dict[str, Any]]:
        return events(self.complete(stream=True, **fields))

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.create_task(serve(self.pipeline, self.backend, self.config, on_bound=self._on_bound))
        await asyncio.gather(self._serving, return_exceptions=True)

    def _on_bound(self, port: int) -> None:
        self.port = port
        self._bound.set()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a complete event stream, which must end with [DONE] unless its last event is an error."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    if '"error"' not in data[-1]:
        assert data.pop() == "[DONE]"
    assert all('"error"' not in item for item in data[:-1])
    return [json.loads(item) for item in data]


# ---------------------------------------------------------------- scripts


def says(text: str | list[int], *, eos: bool = True, tokens_per_step: int = 1) -> Script:
    """Answer with these tokens and end-of-sequence, or up to max_tokens."""

    def script(request: GenerateRequest) -> Iterator[TokenOutput]:
        tokenizer = demo_tokenizer()
        ids = tokenizer.encode(text) if isinstance(text, str) else text
        yield from steps(request, [*ids, *tokenizer.eos_token_ids[:1]] if eos else ids, tokens_per_step)

    return script


def random_words(request: GenerateRequest) -> Iterator[TokenOutput]:
    """Tokens that depend only on the sequence's seed."""
    chance = random.Random(request.params.seed)
    yield from steps(request, [chance.randrange(300, 1000) for _ in range(8)])


def steps(request: GenerateRequest, ids: list[int], tokens_per_step: int = 1) -> Iterator[TokenOutput]:
    params, eos = request.params, demo_tokenizer().eos_token_ids
    limited = ids[: params.max_tokens]
    ended = limited[-1] in eos
    for start in range(0, len(limited), tokens_per_step):
        step = limited[start : start + tokens_per_step]
        is_last = start + len(step) == len(limited)
        yield TokenOutput(
            request_id=request.request_id,
            token_ids=step,
            logprobs=None if params.logprobs is None else [logprob(i, params.logprobs) for i in step],
            prompt_logprobs=_prompt_logprobs(request) if start == 0 else None,
            num_cached_tokens=1,
            finish_reason=("stop" if ended else "length") if is_last else None,
            stop_token_id=step[-1] if is_last and ended else None,
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            transferred_bytes=4096 if start == 0 else 0,
        )


def logprob(token_id: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id, logprob=-0.5, top=[(token_id, -0.5), *((other, -2.0) for other in range(64, 84))][:num_top]
    )


def _prompt_logprobs(request: GenerateRequest) -> list[TokenLogprob] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    first, *rest = request.prompt_token_ids
    return [TokenLogprob(token_id=first, logprob=None), *(logprob(i, num_top) for i in rest)]


def fails(status: int, message: str, *, after: int = 0) -> Script:
    """An error from the engine after some tokens."""

    def script(request: GenerateRequest) -> Iterator[TokenOutput]:
        for _ in range(after):
            yield TokenOutput(request_id=request.request_id, token_ids=demo_tokenizer().encode("a"))
        error = ErrorInfo(status=status, message=message)
        yield TokenOutput(request_id=request.request_id, finish_reason="error", error=error)

    return script


def endless(text: str = "a", *, pause_s: float = 0.001, first_after_s: float = 0.0) -> Script:
    """One token after the other until aborted."""

    async def script(request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        await asyncio.sleep(first_after_s)
        ids = demo_tokenizer().encode(text)
        while True:
            yield TokenOutput(request_id=request.request_id, token_ids=ids)
            await asyncio.sleep(pause_s)

    return script
