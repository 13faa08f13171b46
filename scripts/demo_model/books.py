"""The books: where they come from, which are held out, and how one is taken apart into paragraphs."""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass
from pathlib import Path

# Whole books that neither the tokenizer nor the model sees: held-out loss is measured on them.
HELD_OUT = (
    "The Wendigo",
    "The Valley of Fear",
    "Hard Times",
    "The Gods of Mars",
    "The Railway Children",
    "The Secret Garden",
    "The Man Who Was Thursday",
)


@dataclass(frozen=True)
class Book:
    title: str
    author: str
    text: str

    @property
    def held_out(self) -> bool:
        return self.title in HELD_OUT

    def paragraphs(self) -> list[str]:
        """Paragraphs of prose, without headings, rules and notes."""
        blocks = (re.sub(r"\s*\n\s*", " ", block).strip() for block in re.split(r"\n\s*\n", self.text))
        return [block for block in blocks if len(block) > 30 and not block.startswith(("#", "-", "*", ">", "[", "|"))]


def load_books(data: Path) -> list[Book]:
    """Read books.txt.xz: Markdown books separated by a line `<|endoftext|>`."""
    text = lzma.decompress((data / "books.txt.xz").read_bytes()).decode()
    books = []
    for part in text.split("<|endoftext|>"):
        title = re.search(r"^# Title: (.+)$", part, re.M)
        author = re.search(r"^## Author: (.+)$", part, re.M)
        if title is None or author is None:
            continue
        body = part.split("-------", 1)[-1].strip()
        books.append(Book(title[1].strip(), author[1].strip(), body))
    missing = set(HELD_OUT) - {book.title for book in books}
    if missing:
        raise ValueError(f"held-out books not found in the data: {sorted(missing)}")
    return books
