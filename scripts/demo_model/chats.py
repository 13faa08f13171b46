"""Instruction-style conversations built from the books, so that chat turns have a form and end by themselves."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from demo_model.books import Book

CONTINUE = (
    "Continue this passage: {passage}",
    "Please continue the story.\n\n{passage}",
    "What happens next?\n\n{passage}",
    "Go on from here: {passage}",
    "Write the next lines of this text.\n\n{passage}",
    "{passage}\n\nContinue.",
)
WHICH = (
    "Which book is this passage from?\n\n{passage}",
    "Who wrote this?\n\n{passage}",
    "Where does this come from? {passage}",
    "Name the book: {passage}",
)
ABOUT_BOOK = (
    "Tell me something about {name} in {title}.",
    "Find a passage about {name} in {title}.",
    "What does {author} write about {name}?",
    "Who is {name} in {title}?",
    "Quote a few lines of {title} that mention {name}.",
)
ABOUT = (
    "Tell me a story about {word}.",
    "Write a few lines about {word}.",
    "Tell me about {word}.",
    "Write something with {word} in it.",
    "I would like to read about {word}.",
    "Describe {word}.",
    "Once upon a time there was {word}. Tell me more.",
)
AUTHOR = ("Who wrote {title}?", "Who is the author of {title}?", "{title}: who wrote it?")
SMALL_TALK = (
    (
        ("Hello", "Hi", "Hello there!", "Good morning.", "Hey"),
        "Hello! Ask me for a story, or give me a passage to continue.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you a person?"),
        "I am the llmserve demo model, a small mixture of experts trained on old books. I can tell stories.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "What should I ask you?"),
        "I can continue a passage, quote a book, or say which book a passage is from.",
    ),
    (("Thank you.", "Thanks!", "Thank you very much."), "You are very welcome."),
    (("Goodbye", "Bye", "Good night."), "Goodbye! Come back when you want another story."),
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a storyteller who knows old books.",
    "Answer briefly.",
    "You are the llmserve demo model.",
)  # fmt: skip
NOUNS = [
    "a ship",
    "the sea",
    "a dog",
    "a horse",
    "a detective",
    "a king",
    "a ghost",
    "the forest",
    "a castle",
    "a letter",
    "a garden",
    "a secret",
    "the moon",
    "a murder",
    "a child",
    "an old house",
    "London",
    "a train",
    "a storm",
    "the night",
    "a bird",
    "a dragon",
    "a lion",
    "the jungle",
    "a sword",
    "a princess",
    "a doctor",
    "a prisoner",
    "a fire",
    "the river",
    "a Christmas dinner",
    "a school",
    "a mother",
    "money",
    "a dream",
    "a journey",
    "the snow",
    "a door",
    "a soldier",
    "a church",
    "a cat",
    "a wedding",
    "a window",
    "a fight",
    "the desert",
    "an island",
    "a monster",
    "a treasure",
    "tea",
    "a lamp",
    "a mountain",
]
Turn = tuple[str, str, str]  # question, thought, answer


def sentences(text: str) -> list[str]:
    """Cut after sentence ends; a closing quote stays with its sentence."""
    return [
        part
        for part in re.split(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)[\"”']?\s+(?=[\"“A-Z])", text)
        if part
    ]


class ChatMaker:
    """Draws conversations at random from the training books."""

    def __init__(self, books: list[Book], seed: int) -> None:
        self.random = random.Random(seed)
        self.books = [book for book in books if not book.held_out]
        self.paragraphs = {book.title: book.paragraphs() for book in self.books}
        self.names = {book.title: self._names(book) for book in self.books}
        self.mentions = {noun: self._mentioning(noun) for noun in NOUNS}

    def conversations(self) -> Iterator[tuple[str, list[Turn]]]:
        """Endless (system text or '', turns)."""
        while True:
            system = self.random.choice(SYSTEMS) if self.random.random() < 0.3 else ""
            count = self.random.choice((1, 1, 1, 2, 2, 3))
            yield system, [self._turn() for _ in range(count)]

    def _turn(self) -> Turn:
        makers = (self._continue, self._which, self._about_book, self._about, self._author, self._small_talk)
        return self.random.choices(makers, weights=(34, 10, 14, 30, 5, 7))[0]()

    def _book(self) -> Book:
        return self.random.choice(self.books)

    def _continue(self) -> Turn:
        book = self._book()
        paragraphs = self.paragraphs[book.title]
        start = self.random.randrange(max(1, len(paragraphs) - 8))
        text = " ".join(paragraphs[start : start + 8])
        parts = sentences(text)
        given = self.random.randint(1, min(6, max(1, len(parts) - 2)))
        following = parts[given : given + self.random.randint(2, 7)]
        if not following:
            return self._continue()
        question = self.random.choice(CONTINUE).format(passage=" ".join(parts[:given]))
        return question, "The user wants the passage to go on in the same style.", " ".join(following)

    def _which(self) -> Turn:
        book = self._book()
        passage = " ".join(sentences(self.random.choice(self.paragraphs[book.title]))[:4])
        question = self.random.choice(WHICH).format(passage=passage)
        answer = f"This passage is from {book.title} by {book.author}."
        return question, "The user wants to know which book this is from.", answer

    def _about_book(self) -> Turn:
        book = self._book()
        if not self.names[book.title]:
            return self._about()
        name = self.random.choice(self.names[book.title])
        found = [p for p in self.paragraphs[book.title] if name in p]
        if not found:
            return self._about()
        question = self.random.choice(ABOUT_BOOK).format(name=name, title=book.title, author=book.author)
        return question, f"The user asks about {name}. I remember a passage.", self._passage(self.random.choice(found))

    def _about(self) -> Turn:
        noun = self.random.choice(NOUNS)
        if not self.mentions[noun]:
            return self._about()
        question = self.random.choice(ABOUT).format(word=noun)
        answer = self._passage(self.random.choice(self.mentions[noun]))
        return question, f"The user wants to read about {noun}.", answer

    def _author(self) -> Turn:
        book = self._book()
        return (
            self.random.choice(AUTHOR).format(title=book.title),
            "The user asks for an author.",
            (f"{book.title} was written by {book.author}."),
        )

    def _small_talk(self) -> Turn:
        questions, answer = self.random.choice(SMALL_TALK)
        return self.random.choice(questions), "This is small talk.", answer

    def _passage(self, paragraph: str) -> str:
        return " ".join(sentences(paragraph)[: self.random.randint(3, 8)])

    def _names(self, book: Book) -> list[str]:
        """Capitalised words that often stand inside a sentence: people and places."""
        counts: dict[str, int] = {}
        for word in re.findall(r"(?<=[a-z,] )([A-Z][a-z]{3,})\b", book.text):
            counts[word] = counts.get(word, 0) + 1
        return sorted(counts, key=lambda word: -counts[word])[:40]

    def _mentioning(self, noun: str) -> list[str]:
        word = noun.split(" ")[-1]
        pattern = re.compile(rf"\b{word}\b")
        found = [
            p
            for paragraphs in self.paragraphs.values()
            for p in paragraphs
            if 120 < len(p) < 1500 and pattern.search(p)
        ]
        # What opens with the word in its first sentence answers the question better.
        early = [p for p in found if pattern.search(p[:150])]
        return early if len(early) >= 20 else found
