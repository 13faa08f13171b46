"""The tokenizer: ids to bytes and back, control tokens as text, and what the checkpoint's files say."""

from __future__ import annotations

import asyncio
import json
import shutil
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.config import DEMO_MODEL_PATH
from llmserve.errors import CheckpointError, InvalidRequestError
from llmserve.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer, read_eos_token_ids, read_vocab_size

CONTROL = "<|im_end|>"
MARKUP = "<think>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo's tokenizer.json alone."""
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", tmp_path)
    return tmp_path


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


@settings(deadline=None)  # the machine may be busy
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    singles = {data for data in map(tokenizer.token_bytes, range(tokenizer.vocab_size)) if len(data) == 1}
    assert singles == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("text", [CONTROL, MARKUP])
def test_added_tokens_are_ordinary_text_unless_allowed(tokenizer: Tokenizer, text: str) -> None:
    """B029."""
    token_id = tokenizer.encode(text, allow_special=True)[0]
    assert tokenizer.encode(text, allow_special=True) == [token_id]
    plain = tokenizer.encode(text)
    assert token_id not in plain and len(plain) > 1
    assert tokenizer.decode(plain) == text
    assert tokenizer.token_bytes(token_id) == text.encode()


def test_plain_encoding_differs_in_nothing_else(tokenizer: Tokenizer) -> None:
    text = "It's 1234 o'clock,\r\n\n  naïve 日本語 🙂\tend "
    assert tokenizer.encode(text) == tokenizer.encode(text, allow_special=True)


def test_only_control_tokens_are_special(tokenizer: Tokenizer) -> None:
    control, markup = (tokenizer.encode(text, allow_special=True)[0] for text in (CONTROL, MARKUP))
    assert tokenizer.is_special(control) and not tokenizer.is_special(markup)
    assert tokenizer.decode([control, markup], skip_special_tokens=True) == MARKUP


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_unknown_ids_have_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id]) == ""


@pytest.mark.parametrize("length", [1, LARGE_TEXT_CHARS])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, length: int) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("\ud800" * length)


async def test_large_texts_leave_the_event_loop_free(tokenizer: Tokenizer) -> None:
    text = "It was the best of times, it was the worst of times. " * 8000
    encoding = asyncio.create_task(tokenizer.encode_async(text))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert turns >= 4  # an encoder that keeps the GIL allows one or two
    assert tokenizer.decode(await encoding) == text


def test_vocab_size_counts_added_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.byte_table) == read_vocab_size(DEMO_MODEL_PATH) == 8192


def test_demo_defaults(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids[0] == tokenizer.encode(CONTROL, allow_special=True)[0]
    assert tokenizer.default_sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


def test_greedy_checkpoints_default_to_temperature_zero(folder: Path) -> None:
    write(folder, "generation_config.json", {"do_sample": False, "temperature": 0.6})
    assert Tokenizer.from_folder(folder).default_sampling == {"temperature": 0.0}


def test_eos_falls_back_to_the_model_config(folder: Path) -> None:
    write(folder, "generation_config.json", {"temperature": 0.5})
    write(folder, "config.json", {"eos_token_id": 7, "temperature": 0.1})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == [7] == read_eos_token_ids(folder)
    assert tokenizer.default_sampling == {"temperature": 0.5}


def test_template_file_wins_over_the_config(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "from config"})
    assert Tokenizer.from_folder(folder).chat_template == "from config"
    (folder / "chat_template.jinja").write_text("from file", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "from file"


def test_named_templates_and_tokens(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(
        folder,
        "tokenizer_config.json",
        {"chat_template": templates, "bos_token": None, "eos_token": {"content": CONTROL}, "pad_token": "P"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template == "D"
    assert tokenizer.named_tokens == {"eos_token": CONTROL, "pad_token": "P"}


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"model": 1}'),
        ("tokenizer_config.json", "{not json"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("generation_config.json", '{"eos_token_id": "x"}'),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(folder)
