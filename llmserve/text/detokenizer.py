"""Token ids to text, as they come. Works on bytes, so half characters wait and broken ones never raise."""

from __future__ import annotations

import codecs

from llmserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of the generated tokens of one sequence; the prompt is never part of it.

    Bytes of an unfinished UTF-8 character are held until it is complete. What can no longer become valid is U+FFFD, one
    per maximal ill-formed part (the practice that Unicode and Python's decoder follow).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Text that this token makes final; '' while a character is incomplete, and for tokens without text."""
        if self.skips(token_id):
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def skips(self, token_id: int) -> bool:
        """True for tokens that are left out of the text."""
        return token_id in self._skipped

    @property
    def mid_character(self) -> bool:
        """True while bytes of an unfinished character are held."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """What is left at the end: an incomplete character becomes one U+FFFD."""
        return self._decoder.decode(b"", final=True)


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """A single token for log-probabilities: its text (U+FFFD where it is no whole character) and its true bytes."""
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", errors="replace"), data
