"""A backend of grammars for the built-in model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import kvferry.models
from kvferry.core.errors import GrammarFailed
from kvferry.core.structured_outputs import StructuredOutputs
from kvferry.engine.structured.llguidance_backend import LlguidanceBackend

TOKENIZER = Path(kvferry.models.__file__).with_name("tiny_python")


class Compiling:
    """Compiles constraints, and says whether a grammar permits a text."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
        self.vocab_size = len(self.tokenizer)
        self.eos = int(self.tokenizer.eos_token_id)
        self.names = [str(name) for name in self.tokenizer.convert_ids_to_tokens(range(self.vocab_size))]
        self.backend = LlguidanceBackend(self.tokenizer, self.vocab_size, [self.eos])

    def grammar(self, kind: Any, content: str, **options: Any) -> Any:
        return self.backend.compile(StructuredOutputs(kind=kind, content=content, **options))

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def permits(self, grammar: Any, text: str) -> bool:
        """True if the grammar permits all of the text, and the answer may end after it."""
        try:
            matcher = grammar.matcher(self.tokens(text))
            if not matcher.is_complete:
                matcher.accept(self.eos)
        except GrammarFailed:
            return False
        return bool(matcher.is_complete)


@pytest.fixture(scope="session")
def compiling() -> Compiling:
    return Compiling()
