"""The official OpenAI clients, unmodified, against the real disaggregated system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import openai
import pytest

from .servers import ServerProcess

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "Tell me a story about a ship."}]


@pytest.fixture
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=200, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_whole_answer_and_has_usage(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": QUESTION, "max_tokens": 64, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    text, usage = "", None
    for chunk in stream:
        assert usage is None, "usage comes last"
        usage = chunk.usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="The old house stood", max_tokens=16, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    for chosen, top in zip(logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
        assert chosen is not None
        assert max(top.values()) == pytest.approx(chosen)  # greedy takes the most likely one


def test_n_with_seed_is_reproducible_and_distinct(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            n=3,
            seed=11,
            temperature=1.0,
            max_tokens=40,  # type: ignore[arg-type]
        )
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first, second = texts(), texts()
    assert first == second
    assert len(set(first)) == 3


def test_chat_logprobs_bytes_join_to_the_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=5,  # type: ignore[arg-type]
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert spelled.decode(errors="replace").startswith(choice.message.content or "")


def test_stop_string_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": "The old house stood", "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text  # type: ignore[call-overload]
    stop = whole[20:24]
    answer = client.completions.create(**options, stop=[stop])  # type: ignore[call-overload]
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


NODE_PROGRAM = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story about a ship." }];
const chat = await client.chat.completions.create({ model: "demo", messages, max_tokens: 32, temperature: 0 });
let text = "", usage = null;
const stream = await client.chat.completions.create({
  model: "demo", messages, max_tokens: 32, temperature: 0, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) { text += chunk.choices[0]?.delta?.content ?? ""; usage = chunk.usage ?? usage; }
const many = await client.chat.completions.create({
  model: "demo", messages, max_tokens: 24, n: 3, seed: 5, temperature: 1, logprobs: true, top_logprobs: 2 });
const whole = await client.completions.create({
  model: "demo", prompt: "The old house", max_tokens: 32, temperature: 0 });
const stop = whole.choices[0].text.slice(10, 14);
const cut = await client.completions.create({
  model: "demo", prompt: "The old house", max_tokens: 32, temperature: 0, stop: [stop] });
console.log(JSON.stringify({
  chat: chat.choices[0].message.content, text, usage, finish: cut.choices[0].finish_reason,
  choices: many.choices.map(c => c.message.content), logprobs: many.choices[0].logprobs.content.length,
  cutRight: cut.choices[0].text === whole.choices[0].text.slice(0, whole.choices[0].text.indexOf(stop)) }));
"""


@pytest.mark.timeout(240)
def test_npm_client(demo_server: ServerProcess, tmp_path: Path) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", "openai@6"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=180)
    (tmp_path / "client.mjs").write_text(NODE_PROGRAM)
    run = subprocess.run(
        ["node", "client.mjs"],
        cwd=tmp_path,
        env={**os.environ, "BASE_URL": f"{demo_server.url}/v1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["chat"] == result["text"] != ""
    assert result["usage"]["completion_tokens"] <= 32
    assert result["logprobs"] > 0
    assert len(set(result["choices"])) == 3
    assert result["finish"] == "stop" and result["cutRight"]
