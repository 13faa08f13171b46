"""The tokenizer of a checkpoint: text to ids, ids to bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from llmserve.errors import CheckpointError, InvalidRequestError

LARGE_TEXT_CHARS = 20_000  # texts from here on (some 20 ms) are encoded outside the event loop
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Byte-level BPE, as Qwen's tokenizers are.

    vocab_size: number of tokens, added ones included. byte_table[id]: the bytes of a token (b"" for unused ids).
    special_ids: control tokens such as <|im_end|>. control_texts: their texts; added_texts: those of all added tokens,
    thus also of markup such as <think> that models write as part of an answer.
    named_tokens: "eos_token" and the like, as chat templates may use them.
    eos_token_ids, default_sampling: what generation_config.json says.
    """

    def __init__(
        self,
        backend: HFTokenizer,
        *,
        chat_template: str | None = None,
        named_tokens: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        default_sampling: dict[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.named_tokens = named_tokens or {}
        self.eos_token_ids = list(eos_token_ids)
        self.default_sampling = default_sampling or {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_texts = frozenset(token.content for token in added.values())
        self.control_texts = frozenset(token.content for token in added.values() if token.special)
        self.byte_table = _byte_table(backend, {token_id: token.content for token_id, token in added.items()})
        self._plain = _without_added_tokens(backend)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        Raises CheckpointError naming the file that is missing or wrong.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            backend = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        return cls(
            backend,
            chat_template=_chat_template(folder, config),
            named_tokens=_named_tokens(config),
            eos_token_ids=read_eos_token_ids(folder),
            default_sampling=_default_sampling(read_json(folder / "generation_config.json")),
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Unless `allow_special`, the texts of added tokens such as <|im_end|> stay ordinary text.

        Raises InvalidRequestError for text that is not Unicode (a lone surrogate).
        """
        backend = self.backend if allow_special else self._plain
        try:
            if len(text) < LARGE_TEXT_CHARS:
                return backend.encode(text, add_special_tokens=False).ids
            # `encode` holds the GIL, a batch does not: other threads (the event loop) go on meanwhile.
            return backend.encode_batch([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise InvalidRequestError("text must be valid Unicode, without lone surrogates", param="prompt") from error

    async def encode_async(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The same; a large text is encoded in a thread, so that the event loop goes on."""
        if len(text) < LARGE_TEXT_CHARS:
            return self.encode(text, allow_special=allow_special)
        return await asyncio.to_thread(self.encode, text, allow_special=allow_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: b"" for an id that the tokenizer does not know."""
        return self.byte_table[token_id] if 0 <= token_id < len(self.byte_table) else b""

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which `skip_special_tokens` leaves out of texts."""
        return token_id in self.special_ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of all tokens; bytes that are not UTF-8 become U+FFFD."""
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")


def read_vocab_size(folder: Path) -> int | None:
    """Entries of tokenizer.json, or None without one. A checkpoint's embedding may be padded beyond it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    try:
        added = [token["id"] for token in raw.get("added_tokens", [])]
        return max([*raw["model"]["vocab"].values(), *added]) + 1
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} has no vocabulary of token ids: {error!r}") from error


def read_eos_token_ids(folder: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        token_ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in token_ids):
            raise CheckpointError(f"{folder / name}: eos_token_id must be an id or a list of ids, got {value!r}")
        if token_ids:
            return token_ids
    return []


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


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one of tokenizer_config.json: a string, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string")
    return template


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Values are strings, or objects of older checkpoints with the text under "content"."""
    tokens = {name: config.get(name) for name in NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _default_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}


def _without_added_tokens(backend: HFTokenizer) -> HFTokenizer:
    """The same vocabulary and rules, but no added tokens: to it "<|im_end|>" is ordinary text."""
    plain = HFTokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _byte_table(backend: HFTokenizer, added: dict[int, str]) -> list[bytes]:
    """The bytes that each id stands for. Byte-level BPE writes bytes as printable characters; this inverts it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    byte_of = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    byte_of |= {chr(256 + index): byte for index, byte in enumerate(others)}
    vocab = backend.get_vocab(with_added_tokens=False)
    table = [b""] * (max([*vocab.values(), *added], default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
    for token_id, text in added.items():
        table[token_id] = text.encode()
    return table
