"""The model that ships with the package is small, whole, and knows Python."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvferry.models.catalog import BUILTIN, resolve

NAME = "kvferry/tiny-python"
SNIPPET = '''\
def read_lines(path, encoding="utf-8"):
    """Return the lines of the file at path, without the line ends."""
    result = []
    with open(path, encoding=encoding) as file:
        for line in file:
            result.append(line.rstrip("\\n"))
    return result


class Counter:
    def __init__(self, name):
        self.name = name
        self.value = 0

    def __repr__(self):
        return "%s(%r)" % (self.__class__.__name__, self.name)


if __name__ == "__main__":
    unittest.main()
'''


@pytest.fixture(scope="module")
def directory() -> Path:
    path = resolve(NAME)
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def training(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    return facts


def losses(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the loss in nats of each token but the first."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = model(row[:, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")


def test_catalog_leads_to_directories_and_leaves_hub_ids_alone(tmp_path: Path) -> None:
    assert NAME in BUILTIN
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("some-organization/some-model") == "some-organization/some-model"


def test_folder_is_small_and_whole(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {"LICENSE", "README.md", "training.json"} <= names
    assert sum(path.stat().st_size for path in directory.iterdir() if path.is_file()) <= 12e6


def test_config_has_the_shape_the_card_gives(directory: Path, training: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(directory)
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 4096
    assert config.num_hidden_layers == training["settings"]["layers"]


def test_special_tokens_agree_everywhere(directory: Path, tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(directory)
    generation = GenerationConfig.from_pretrained(directory)
    assert len(tokenizer) == config.vocab_size
    for each in (config, generation):
        assert each.bos_token_id == tokenizer.bos_token_id
        assert each.eos_token_id == tokenizer.eos_token_id
        assert each.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("text", [SNIPPET, "x = 'naïve — 東京 🚢'\n\tif  x:\r\n        pass", "0123456789", ""])
def test_tokenizer_gives_back_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders_roles_and_the_generation_prompt(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write a function."},
        {"role": "assistant", "content": "def function(): pass"},
        {"role": "user", "content": [{"type": "text", "text": "Another."}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Write a function.<|end|>"
        "<|assistant|>def function(): pass<|end|><|user|>Another.<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_renders_tools_and_calls(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
    messages = [
        {"role": "user", "content": "Look a up."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|begin|><|system|>")
    assert '"name": "look_up"' in text
    assert '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call><|end|>' in text
    assert text.endswith("<|tool|>42<|end|><|assistant|>")


def test_model_predicts_python_far_better_than_chance(model: Any, tokenizer: Any) -> None:
    perplexity = losses(model, tokenizer(SNIPPET)["input_ids"]).mean().exp().item()
    assert perplexity < 40


def test_perplexity_of_the_reference_text_is_the_recorded_one(
    model: Any, tokenizer: Any, training: dict[str, Any]
) -> None:
    reference = training["reference"]
    found = losses(model, tokenizer(reference["text"])["input_ids"])
    assert len(found) == reference["predicted_tokens"]
    assert found.mean().exp().item() == pytest.approx(reference["perplexity_per_token"], rel=0.01)


def test_recorded_numbers_are_consistent(training: dict[str, Any]) -> None:
    held_out = training["held_out"]
    assert math.exp(held_out["loss_per_token"]) == pytest.approx(held_out["perplexity_per_token"], rel=1e-3)
    nats = held_out["loss_per_token"] * held_out["predicted_tokens"]
    assert nats / math.log(2) / held_out["bytes"] == pytest.approx(held_out["bits_per_byte"], rel=1e-3)
    assert 100 <= len(training["curve"]) <= 200
    assert training["curve"][-1]["step"] == training["steps"]


def test_long_contexts_work(model: Any, tokenizer: Any, training: dict[str, Any]) -> None:
    by_position = training["held_out"]["perplexity_by_position"]
    assert by_position["1024-2047"] < by_position["0-255"] * 1.2
    text = (SNIPPET * 20)[:8000]
    ids = tokenizer(text)["input_ids"][:2048]
    assert len(ids) == 2048
    # A text that repeats is easy to anyone who can look back.
    assert losses(model, ids)[-256:].mean().exp() < 3


def test_chat_answers_end_by_themselves(model: Any, tokenizer: Any) -> None:
    question = "Write a Python function `close`: Close the file."
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=200, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer).startswith("def close(")


def test_the_card_and_the_licence_say_where_the_text_came_from(directory: Path, training: dict[str, Any]) -> None:
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert f"{training['held_out']['perplexity_per_token']:.2f}" in card
    assert "Python Software Foundation" in card
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (directory / "LICENSE").read_text(encoding="utf-8")
