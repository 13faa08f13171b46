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
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: list[int]) -> str:
        """Text that is final after these tokens; '' while a character is incomplete. Unknown ids add nothing."""
        table, skipped = self._bytes, self._skipped
        data = b"".join(table[i] for i in token_ids if i < len(table) and i not in skipped)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: an incomplete character becomes one U+FFFD."""
        return self._decoder.decode(b"", final=True)


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """A single token for log-probabilities: its text (replaced where it is not a whole character) and its true bytes."""
    data = tokenizer.token_bytes[token_id] if token_id < len(tokenizer.token_bytes) else b""
    return data.decode("utf-8", errors="replace"), data
