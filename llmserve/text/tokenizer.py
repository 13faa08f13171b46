"""The tokenizer of a checkpoint: text to ids, ids to bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from llmserve.errors import CheckpointError

LARGE_TEXT_CHARS = 20_000  # longer texts are encoded in a thread
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Tokenizer:
    """Byte-level BPE, as Qwen's tokenizers are. `default_sampling`: what generation_config.json recommends."""

    def __init__(self, backend: HFTokenizer, config: dict[str, Any], generation: dict[str, Any]) -> None:
        self.backend = backend
        self.chat_template: str | None = config.get("chat_template")
        self.eos_token_ids = _eos_token_ids(generation)
        self.default_sampling = _default_sampling(generation)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.added_texts = sorted(self.added.values(), key=len, reverse=True)
        self.token_bytes = _byte_table(backend, self.added)
        # A second backend without added tokens: its encoding of "<|im_end|>" is ordinary text.
        plain = json.loads(backend.to_str())
        plain["added_tokens"] = []
        self._plain = HFTokenizer.from_str(json.dumps(plain))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            backend = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        generation = read_json(folder / "generation_config.json") or read_json(folder / "config.json")
        return cls(backend, config, generation)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Unless `allow_special`, control tokens such as <|im_end|> stay ordinary text."""
        backend = self.backend if allow_special else self._plain
        return backend.encode(text, add_special_tokens=False).ids

    async def encode_async(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The same; a large text is encoded in a thread, so that the event loop goes on."""
        if len(text) < LARGE_TEXT_CHARS:
            return self.encode(text, allow_special=allow_special)
        return await asyncio.to_thread(self.encode, text, allow_special=allow_special)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes[i] for i in kept).decode("utf-8", errors="replace")


def read_vocab_size(folder: Path) -> int | None:
    """Entries of tokenizer.json, or None without one. A checkpoint's embedding may be padded beyond it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    added = [token["id"] for token in raw.get("added_tokens", [])]
    return max([*raw["model"]["vocab"].values(), *added]) + 1


def read_eos_token_ids(folder: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    return _eos_token_ids(read_json(folder / "generation_config.json")) or _eos_token_ids(
        read_json(folder / "config.json")
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} when there is no such file. Raises CheckpointError for anything but an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _eos_token_ids(config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(i) for i in value]


def _default_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}


def _byte_table(backend: HFTokenizer, added: dict[int, str]) -> list[bytes]:
    """The bytes that each id stands for. Byte-level BPE writes bytes as printable characters; this inverts it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    byte_of = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    byte_of |= {chr(256 + index): byte for index, byte in enumerate(others)}
    vocab = backend.get_vocab(with_added_tokens=False)
    table = [b""] * (max([*vocab.values(), *added]) + 1)
    for token, token_id in vocab.items():
        table[token_id] = bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
    for token_id, text in added.items():
        table[token_id] = text.encode()
    return table
