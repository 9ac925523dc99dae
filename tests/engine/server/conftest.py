"""A tiny tokenizer, and a server of the deterministic engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .fake_engine import DeterministicEngine
from .running import running_in_thread

TEXT = """The quick brown fox jumps over the lazy dog. A ferry carries people and things from one side of the water
to the other, and comes back for more. What is the capital of France? It is Paris, naturally. Zürich, Straße, naïve,
日本語, 🎉 and 👩‍👩‍👧 are spelled with more than one byte a letter. 0123456789 (){}[]<>!?;:'"-+*/=\n"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ flavour }}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on a few lines; every prompt begins with <|begin|>, as many models' do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def backend(tokenizer: PreTrainedTokenizerFast) -> Any:
    return tokenizer.backend_tokenizer


@pytest.fixture(scope="session")
def engine(tokenizer: PreTrainedTokenizerFast) -> DeterministicEngine:
    return DeterministicEngine(tokenizer)


@pytest.fixture(scope="session")
def base_url(engine: DeterministicEngine) -> Iterator[str]:
    """The server that the OpenAI suite talks to."""
    with running_in_thread(engine) as url:
        yield f"{url}/v1"
