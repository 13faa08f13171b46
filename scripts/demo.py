"""The main job, seen from outside: start a server, ask it something, show which process did what."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

PROMPT = (
    "Continue this passage: It was a dark and stormy evening in Baker Street. Holmes had been silent for an hour, "
    "stretched upon the sofa with his violin across his knees, while I turned over the pages of the evening paper. "
    '"My dear Watson," said he at last, without opening his eyes, "you have been thinking of the sea."'
)
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=120)
    arguments = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "llmserve.cli", "serve", "demo", "--prefill", "1", "--decode", "1"]
    console.print(f"[dim]$ llmserve serve demo --prefill 1 --decode 1 --port {port}[/dim]")
    server = subprocess.Popen([*command, "--port", str(port)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_TIMEOUT_S) as client:
            wait_until_ready(client, server)
            show_processes(client)
            metadata = ask(client, arguments.prompt, arguments.max_tokens)
            show_work(metadata)
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"the server was not ready within {START_TIMEOUT_S:g} s")


def show_processes(client: httpx.Client) -> None:
    health = client.get("/health").json()
    table = Table("process", "pid", "role", "KV pages free / all", box=None)
    for worker in sorted(health["workers"], key=lambda worker: worker["worker_id"]):
        pages = f"{worker['free_pages']} / {worker['total_pages']}"
        table.add_row(worker["worker_id"], str(worker["pid"]), worker["role"], pages)
    console.print(table)


def ask(client: httpx.Client, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Stream one chat answer to the terminal; returns usage, hand-off metadata and times."""
    console.print(f"\n[bold]user[/bold]  {prompt}\n[bold]answer[/bold] ", end="")
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_metadata": True,
    }
    started = time.monotonic()
    first_s = 0.0
    found: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for chunk in events(response):
            if "error" in chunk:
                sys.exit(f"\nerror: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - started
                    console.print(choice["delta"]["content"], end="", markup=False)
            found["usage"] = chunk.get("usage") or found.get("usage")
            found["llmserve"] = chunk.get("llmserve") or found.get("llmserve")
    console.print()
    return {**found, "first_s": first_s, "total_s": time.monotonic() - started}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    if response.status_code != 200:
        response.read()
        sys.exit(f"\nerror {response.status_code}: {response.text}")
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def show_work(metadata: dict[str, Any]) -> None:
    usage, handoff = metadata["usage"], metadata["llmserve"]
    generated, prompt = usage["completion_tokens"], usage["prompt_tokens"]
    rate = (generated - 1) / max(1e-9, metadata["total_s"] - metadata["first_s"])
    console.print()
    table = Table("who", "did what", box=None)
    table.add_row(
        "router + HTTP server", f"rendered and tokenised the chat ({prompt} tokens), streamed {generated} tokens"
    )
    table.add_row(handoff["prefill_worker"], f"computed the KV cache of {prompt - 1} prompt tokens")
    table.add_row("hand-off", f"{handoff['transferred_bytes']:,} bytes of KV written into the decoder's pages")
    table.add_row(
        handoff["decode_worker"], f"first token after {metadata['first_s'] * 1e3:.0f} ms, then {rate:.0f} tokens/s"
    )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
