"""The `llmserve` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from llmserve import __version__
from llmserve.config import RouterConfig, ServerConfig, WorkerConfig
from llmserve.errors import ConfigError, LlmserveError

EXAMPLES = """examples:
  llmserve serve demo                             one prefiller and one decoder on this host, port 8000
  llmserve serve /models/Qwen3-30B-A3B --unified  one process does both
  llmserve keys keys                              CURVE keys: copy the folder to every host
  llmserve router MODEL --bind tcp://10.0.0.1:5555 --curve-dir keys     several hosts: the front,
  llmserve prefill MODEL --router tcp://10.0.0.1:5555 --curve-dir keys  then workers where the GPUs are
  llmserve chat demo                              talk to a model in the terminal
  llmserve quantize SRC DST --format mxfp8        convert a checkpoint
"""


def main(argv: list[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(arguments.run(arguments))
    except LlmserveError as error:
        sys.exit(f"llmserve: error: {error.message}")
    except KeyboardInterrupt:
        sys.exit(130)


# ---------------------------------------------------------------- commands


def serve(arguments: argparse.Namespace) -> int:
    """Router, HTTP server and workers on this host."""
    from llmserve.cluster import Cluster, worker_configs

    prefill, decode = (0, 0) if arguments.unified else (arguments.prefill, arguments.decode)
    workers = worker_configs(worker_config(arguments), prefill, decode)
    cluster = Cluster(arguments.model, workers, escape_special_tokens=not arguments.allow_special_tokens)
    return run_until_signal(_serve_cluster(cluster, server_config(arguments)))


def router(arguments: argparse.Namespace) -> int:
    """Router and HTTP server; workers connect from other hosts or shells."""
    from llmserve.cluster import Cluster

    cluster = Cluster(
        arguments.model,
        [],
        RouterConfig(bind=arguments.bind, curve_dir=arguments.curve_dir),
        escape_special_tokens=not arguments.allow_special_tokens,
    )
    return run_until_signal(_serve_cluster(cluster, server_config(arguments)))


def worker(arguments: argparse.Namespace) -> int:
    """One prefiller, decoder or unified worker that connects to a router."""
    from llmserve.engine.worker import serve_worker

    config = worker_config(arguments)
    config.role = arguments.role
    config.worker_id = arguments.worker_id or f"{arguments.role}-{os.uname().nodename}-{os.getpid()}"
    config.router_address = arguments.router
    config.host = arguments.host
    uvloop.run(serve_worker(config))
    return 0


def chat(arguments: argparse.Namespace) -> int:
    """Talk to a model in the terminal."""
    from llmserve.chat import run_chat

    return run_chat(worker_config(arguments), arguments)


def quantize(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint to MXFP8 or block FP8, offline."""
    from llmserve.models.quantize import quantize_checkpoint

    quantize_checkpoint(arguments.source, arguments.destination, arguments.format)
    return 0


def keys(arguments: argparse.Namespace) -> int:
    """Make the CURVE key pair of a cluster; every host needs a copy of the folder."""
    from llmserve.control.sockets import create_keys

    create_keys(arguments.folder)
    return 0


async def _serve_cluster(cluster: Any, config: ServerConfig) -> None:
    from llmserve.server.serve import serve as serve_http

    await cluster.start()
    try:
        await serve_http(cluster.pipeline, cluster.router, config, on_bound=lambda port: announce(config.host, port))
    finally:
        await cluster.stop()


def announce(host: str, port: int) -> None:
    print(f"llmserve: serving on http://{host}:{port}/v1", file=sys.stderr, flush=True)


def run_until_signal(main_task: Coroutine[Any, Any, None]) -> int:
    """Run to its end; SIGTERM and SIGINT cancel it, so that everything it started is stopped in order."""

    async def supervise() -> None:
        task = asyncio.ensure_future(main_task)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            pass

    uvloop.run(supervise())
    return 0


# ---------------------------------------------------------------- options


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmserve",
        description="Disaggregated serving of Qwen3 mixture-of-experts models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"llmserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = _command(commands, "serve", serve)
    command.add_argument("--prefill", type=int, default=1, metavar="N", help="prefiller processes (1)")
    command.add_argument("--decode", type=int, default=1, metavar="M", help="decoder processes (1)")
    command.add_argument("--unified", action="store_true", help="one worker does prefill and decode")
    _server_options(command)
    _worker_options(command)

    command = _command(commands, "router", router)
    command.add_argument("--bind", default="tcp://127.0.0.1:5555", help="where workers connect (tcp://127.0.0.1:5555)")
    _server_options(command)
    _curve_option(command)

    for role in ("prefill", "decode", "unified"):
        command = _command(commands, role, worker, help=f"a {role} worker that connects to a router")
        command.set_defaults(role=role)
        command.add_argument("--router", required=True, metavar="ADDRESS", help="e.g. tcp://10.0.0.1:5555")
        command.add_argument("--host", default="127.0.0.1", help="address of this host as peers reach it (127.0.0.1)")
        command.add_argument("--worker-id", default="", help="stable name (made from role and host)")
        _worker_options(command)
        _curve_option(command)

    command = _command(commands, "chat", chat)
    command.add_argument("--prompt", help="ask this and exit; without it: a conversation")
    command.add_argument("--system", help="system message")
    command.add_argument("--temperature", type=float)
    command.add_argument("--max-tokens", type=int)
    command.add_argument("--seed", type=int)
    _worker_options(command)

    command = commands.add_parser("quantize", help=quantize.__doc__, description=quantize.__doc__)
    command.set_defaults(run=quantize, log_level="warning")
    command.add_argument("source", metavar="SRC", help="checkpoint folder")
    command.add_argument("destination", metavar="DST", help="folder to create")
    command.add_argument("--format", choices=("mxfp8", "fp8-block"), default="mxfp8")

    command = commands.add_parser("keys", help=keys.__doc__, description=keys.__doc__)
    command.set_defaults(run=keys, log_level="warning")
    command.add_argument("folder", metavar="DIR")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str | None = None
) -> argparse.ArgumentParser:
    text = help or run.__doc__ or name
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("model", metavar="MODEL", help="checkpoint folder, or the word demo")
    command.add_argument("--served-model-name", default="", help="name that clients use (the folder's name)")
    command.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return command


def _server_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("HTTP server")
    group.add_argument("--http-host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks one (8000)")
    group.add_argument(
        "--api-key", action="append", default=[], help="accepted key; may be repeated (also LLMSERVE_API_KEY)"
    )
    group.add_argument("--max-body-bytes", type=int, default=ServerConfig.max_body_bytes)
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="let user text such as <|im_end|> become control tokens (off: it stays text)",
    )


def _worker_options(command: argparse.ArgumentParser) -> None:
    defaults = WorkerConfig
    group = command.add_argument_group("engine")
    group.add_argument("--device", default=defaults.device, choices=("auto", "cpu", "cuda"))
    group.add_argument("--dtype", default=defaults.dtype, choices=("auto", "float32", "bfloat16"))
    group.add_argument("--page-size", type=int, default=defaults.page_size, help="tokens per KV page (64)")
    group.add_argument("--num-pages", type=int, help="KV pages of a worker (from --kv-memory-mib)")
    group.add_argument("--kv-memory-mib", type=int, default=256, help="KV memory of a worker (256)")
    group.add_argument("--max-model-len", type=int, help="longest prompt + output (the checkpoint's)")
    group.add_argument("--max-batch", type=int, default=defaults.max_batch, help="sequences per step (64)")
    group.add_argument(
        "--max-batch-tokens",
        type=int,
        default=defaults.max_batch_tokens,
        help="tokens per step; longer prompts are chunked (512)",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="never reuse KV pages of equal prefixes")
    group.add_argument("--transport", default=defaults.transport, choices=("shared_memory", "tcp"))
    group.add_argument("--on-prefill-failure", default=defaults.on_prefill_failure, choices=("recompute", "error"))
    group.add_argument("--threads", type=int, default=0, help="CPU threads of a worker (cores / 2)")


def _curve_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--curve-dir", default="", help="folder of CURVE keys: needed for any address but loopback")


def worker_config(arguments: argparse.Namespace) -> WorkerConfig:
    return WorkerConfig(
        model=arguments.model,
        served_model_name=arguments.served_model_name,
        device=arguments.device,
        dtype=arguments.dtype,
        page_size=arguments.page_size,
        num_pages=arguments.num_pages,
        kv_memory_bytes=arguments.kv_memory_mib * 1024 * 1024,
        max_model_len=arguments.max_model_len,
        max_batch=arguments.max_batch,
        max_batch_tokens=arguments.max_batch_tokens,
        prefix_cache=not arguments.no_prefix_cache,
        transport=arguments.transport,
        on_prefill_failure=arguments.on_prefill_failure,
        threads=arguments.threads,
        curve_dir=getattr(arguments, "curve_dir", ""),
    )


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    keys = list(arguments.api_key)
    if os.environ.get("LLMSERVE_API_KEY"):
        keys.append(os.environ["LLMSERVE_API_KEY"])
    if any(not key for key in keys):
        raise ConfigError("api-key: a key must not be empty")
    return ServerConfig(
        host=arguments.http_host,
        port=arguments.port,
        served_model_name=arguments.served_model_name,
        api_keys=keys,
        max_body_bytes=arguments.max_body_bytes,
        escape_special_tokens=not arguments.allow_special_tokens,
        log_level=arguments.log_level,
    )


if __name__ == "__main__":
    main()
