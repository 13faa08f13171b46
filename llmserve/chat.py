"""`llmserve chat`: a conversation in the terminal, on the embedded engine."""

from __future__ import annotations

import argparse
import asyncio
import sys

from llmserve.config import WorkerConfig
from llmserve.embedded import Engine, Message
from llmserve.errors import InvalidRequestError
from llmserve.sampling_params import SamplingParams


def run_chat(config: WorkerConfig, arguments: argparse.Namespace) -> int:
    """One question with --prompt, otherwise until end of input. `/new` forgets the conversation."""
    history: list[Message] = []
    if arguments.system:
        history.append({"role": "system", "content": arguments.system})
    with Engine.from_config(config) as engine:
        params = sampling_params(engine, arguments)
        if arguments.prompt is not None:
            asyncio.run(answer(engine, [*history, {"role": "user", "content": arguments.prompt}], params))
            return 0
        print(f"Talking to {arguments.model}. /new starts over, Ctrl-D ends.")
        start = len(history)
        while (line := _ask()) is not None:
            if line == "/new":
                del history[start:]
            elif line:
                history.append({"role": "user", "content": line})
                try:
                    history.append({"role": "assistant", "content": asyncio.run(answer(engine, history, params))})
                except InvalidRequestError as error:
                    print(f"({error.message}; /new starts over)")
                    history.pop()
    return 0


async def answer(engine: Engine, messages: list[Message], params: SamplingParams) -> str:
    """Stream one answer to standard output and return it."""
    token_ids = engine.cluster.pipeline.tokenize_chat(messages)
    text = ""
    async for delta in engine.stream(token_ids, params):
        text += delta.text
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    print()
    return text


def sampling_params(engine: Engine, arguments: argparse.Namespace) -> SamplingParams:
    """The checkpoint's own defaults, overridden by what was given."""
    given = {
        name: value for name in ("temperature", "max_tokens", "seed") if (value := getattr(arguments, name)) is not None
    }
    return SamplingParams(**{**engine.tokenizer.default_sampling, **given})


def _ask() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
