"""Token ids to text, incrementally: never an exception, never half a character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.text.detokenizer import IncrementalDetokenizer, token_text
from llmserve.text.tokenizer import Tokenizer


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    id_of = {data: token_id for token_id, data in enumerate(tokenizer.byte_table)}
    return [id_of[bytes([byte])] for byte in data]


def pieces(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def test_half_characters_wait(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, byte_tokens(tokenizer, "a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_stays_incomplete_is_one_replacement(tokenizer: Tokenizer) -> None:
    """B001."""
    assert pieces(tokenizer, byte_tokens(tokenizer, "🙂".encode()[:3])) == ["", "", "", "\ufffd"]


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tokenizer: Tokenizer) -> None:
    """B001: the rest of the character is all that the model generated."""
    assert "".join(pieces(tokenizer, byte_tokens(tokenizer, "🙂".encode()[2:] + b"!"))) == "\ufffd\ufffd!"


def test_broken_bytes_never_raise(tokenizer: Tokenizer) -> None:
    """B002: a lead byte, then ' the', again and again."""
    (lead,) = byte_tokens(tokenizer, b"\xe2")
    (the,) = tokenizer.encode(" the")
    assert "".join(pieces(tokenizer, [lead, the] * 3)) == "\ufffd the" * 3


@settings(deadline=None)  # the machine may be busy
@given(data=st.data())
def test_any_tokens_give_what_decoding_the_whole_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """B002."""
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    for skip in (True, False):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(pieces(tokenizer, token_ids, skip=skip)) == expected


@settings(deadline=None)  # the machine may be busy
@given(data=st.binary(max_size=40))
def test_bytes_become_text_as_python_decodes_them(tokenizer: Tokenizer, data: bytes) -> None:
    """B002: one U+FFFD per maximal ill-formed part."""
    assert "".join(pieces(tokenizer, byte_tokens(tokenizer, data))) == data.decode("utf-8", errors="replace")


def test_special_tokens_can_be_kept(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<|im_end|>", allow_special=True)[0]
    assert "".join(pieces(tokenizer, [end])) == ""
    assert "".join(pieces(tokenizer, [end], skip=False)) == "<|im_end|>"


def test_unknown_ids_add_nothing(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, [10**9, *tokenizer.encode("a")])) == "a"


def test_token_texts_are_real_text_and_bytes(tokenizer: Tokenizer) -> None:
    """B004: no byte-level alphabet (mojibake) in texts or bytes."""
    text = " 你好，世界 naïve 🙂"
    tokens = [token_text(tokenizer, token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(data for _, data in tokens) == text.encode()
    assert all(shown == data.decode("utf-8", errors="replace") for shown, data in tokens)
