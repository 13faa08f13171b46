"""The demo model's tokenizer, and tokenizers with a template of a test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmserve.config import DEMO_MODEL_PATH
from llmserve.text.chat_template import ChatTemplate
from llmserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO_MODEL_PATH)


@pytest.fixture(scope="session")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer)


@pytest.fixture(scope="session")
def template_of(tokenizer: Tokenizer) -> Callable[[str], ChatTemplate]:
    """A chat template written in a test, over the demo tokenizer."""

    def build(source: str) -> ChatTemplate:
        return ChatTemplate(
            Tokenizer(tokenizer.backend, chat_template=source, named_tokens={"eos_token": "<|im_end|>"})
        )

    return build
