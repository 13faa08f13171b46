"""The embedded engine: text in, text out, the same path as the server without HTTP.

    from llmserve import Engine, SamplingParams

    with Engine("demo") as engine:
        for output in engine.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.text)

Everything runs on an event loop of its own thread, so it works in a script, in a notebook and inside another loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from llmserve.cluster import Cluster, worker_configs
from llmserve.config import WorkerConfig
from llmserve.errors import InvalidRequestError, LlmserveError
from llmserve.pipeline import CompletedChoice, TextDelta, TextRequest
from llmserve.sampling_params import SamplingParams

Prompt = str | list[int]
Message = dict[str, Any]
T = TypeVar("T")


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its finished choices (`params.n` of them). `text` is that of the first."""

    prompt_token_ids: list[int]
    outputs: list[CompletedChoice]

    @property
    def text(self) -> str:
        return self.outputs[0].text


class Engine:
    """An engine in this process, or with `prefill` and `decode` a disaggregated one in processes of its own.

    `model` is a checkpoint folder or "demo"; further keyword arguments are the fields of WorkerConfig, such as
    `num_pages`, `max_batch_tokens`, `prefix_cache`, `transport`. Raises CheckpointError or ConfigError.
    """

    def __init__(self, model: str = "demo", *, prefill: int = 0, decode: int = 0, **options: Any) -> None:
        self._start(WorkerConfig(model=model, **options), prefill, decode)

    @classmethod
    def from_config(cls, config: WorkerConfig, *, prefill: int = 0, decode: int = 0) -> Engine:
        """The same from a WorkerConfig; its role and worker_id are set here."""
        engine = cls.__new__(cls)
        engine._start(config, prefill, decode)
        return engine

    def _start(self, config: WorkerConfig, prefill: int, decode: int) -> None:
        self.cluster = Cluster(config.model, worker_configs(config, prefill, decode), in_process=prefill == 0)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmserve", daemon=True)
        self._closed = False
        self._thread.start()
        try:
            self._run(self.cluster.start())
        except BaseException:
            self._stop_loop()
            raise

    @property
    def tokenizer(self) -> Any:
        return self.cluster.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Generate for one prompt or many (text or token ids), all at once; outputs are in the order of the prompts.

        Raises InvalidRequestError for a wrong prompt or parameter. An error of one prompt ends the call.
        """
        requests = self._requests(prompts, params, cache_salt)
        return self._run(self._generate_all(requests))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_options: Any
    ) -> RequestOutput:
        """Answer a conversation (OpenAI-style messages), rendered with the model's chat template."""
        token_ids = self.cluster.pipeline.tokenize_chat(list(messages), **template_options)
        return self.generate([token_ids], params)[0]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> AsyncIterator[TextDelta]:
        """Deltas of text as they come. Leaving the loop early aborts the request and frees its pages."""
        (request,) = self._requests(prompt, params, cache_salt)
        queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()
        caller = asyncio.get_running_loop()

        async def pump() -> None:
            end: BaseException | None = None
            try:
                async for delta in self.cluster.pipeline.generate(request):
                    caller.call_soon_threadsafe(queue.put_nowait, delta)
            except Exception as error:
                end = error
            caller.call_soon_threadsafe(queue.put_nowait, end)

        pumping = self._submit(pump())
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    def close(self) -> None:
        """Stop the workers and the thread. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._run(self.cluster.stop())
        finally:
            self._stop_loop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str,
    ) -> list[TextRequest]:
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if one else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
        if len(each) != len(listed):
            raise InvalidRequestError(f"{len(listed)} prompts but {len(each)} sampling parameters", param="params")
        encode = self.cluster.tokenizer.encode
        return [
            TextRequest(
                prompt_token_ids=encode(prompt, allow_special=True) if isinstance(prompt, str) else list(prompt),
                params=param,
                request_id=uuid.uuid4().hex,
                cache_salt=cache_salt,
            )
            for prompt, param in zip(listed, each, strict=True)
        ]

    async def _generate_all(self, requests: list[TextRequest]) -> list[RequestOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.cluster.pipeline.generate_all(request)) for request in requests]
        return [
            RequestOutput(request.prompt_token_ids, task.result())
            for request, task in zip(requests, tasks, strict=True)
        ]

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            first = next((e for e in group.exceptions if isinstance(e, LlmserveError)), group.exceptions[0])
            raise first from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()
