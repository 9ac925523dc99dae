"""Random models load back, decode in a lively way, and react to every feature they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvferry.models.random_model import ARCHITECTURES, DEFAULT_VOCABULARY_SIZE, main, make_random_model

NEW_TOKENS = 30
needs_tokenizer = pytest.mark.skipif(
    not (Path(__file__).parents[2] / "src/kvferry/models/tiny_python/tokenizer.json").exists(),
    reason="the tiny-python tokenizer is not there",
)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def random_prompt(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, DEFAULT_VOCABULARY_SIZE, (1, length), generator=generator)


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def greedy(model: Any, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return the tokens decoded after ``prompt`` and their logits, ``[tokens, vocabulary]``."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, prompt.shape[1] :].tolist(), torch.cat(output.logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_decodes_varied_text_that_depends_on_the_prompt(architecture: str, tmp_path: Path) -> None:
    model = load(make_random_model(tmp_path, architecture, tokenizer=None))
    first, first_logits = greedy(model, random_prompt(5, seed=1))
    second, second_logits = greedy(model, random_prompt(60, seed=2))
    assert first != second
    assert len({*first, *second}) >= 12
    logits = torch.cat([first_logits, second_logits])
    assert logits.isfinite().all()
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_next_token_depends_on_tokens_inside_the_window(architecture: str, tmp_path: Path) -> None:
    model = load(make_random_model(tmp_path, architecture, tokenizer=None))
    prompt = random_prompt(24, seed=3)
    changed = prompt.clone()
    changed[0, 2] += 1
    with torch.no_grad():
        before, after = model(prompt).logits[0, -1], model(changed).logits[0, -1]
    assert (before - after).norm() > 0.05 * before.norm()


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_the_window_matters(architecture: str, tmp_path: Path) -> None:
    narrow = load(make_random_model(tmp_path / "narrow", architecture, tokenizer=None))
    wide = load(make_random_model(tmp_path / "wide", architecture, tokenizer=None, sliding_window=512))
    prompt = random_prompt(64, seed=4)
    with torch.no_grad():
        difference = narrow(prompt).logits[0] - wide(prompt).logits[0]
    assert difference[:32].abs().max() < 1e-3
    assert difference[40:].abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "ending"),
    [("qwen2", "q_proj.bias"), ("gpt_oss", "sinks"), ("deepseek_v3", "e_score_correction_bias")],
)
def test_parameters_that_start_at_zero_get_random_values(architecture: str, ending: str, tmp_path: Path) -> None:
    weights = read_weights(make_random_model(tmp_path, architecture, tokenizer=None))
    chosen = [tensor for name, tensor in weights.items() if name.endswith(ending)]
    assert chosen
    assert all(tensor.std() > 0.05 for tensor in chosen)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_same_seed_same_weights_and_another_seed_others(architecture: str, tmp_path: Path) -> None:
    first = make_random_model(tmp_path / "first", architecture, tokenizer=None)
    again = make_random_model(tmp_path / "again", architecture, tokenizer=None)
    other = make_random_model(tmp_path / "other", architecture, tokenizer=None, seed=1)
    name = "model.safetensors"
    assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / name).read_bytes() != (other / name).read_bytes()


def test_shards_hold_the_same_weights_as_one_file(tmp_path: Path) -> None:
    whole = make_random_model(tmp_path / "whole", tokenizer=None)
    split = make_random_model(tmp_path / "split", tokenizer=None, max_shard_size="200KB")
    assert len(list(split.glob("*.safetensors"))) > 1
    index = json.loads((split / "model.safetensors.index.json").read_text())
    weights = read_weights(whole)
    assert set(index["weight_map"]) == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_weights(split).items())


def test_overrides_and_dtype_reach_the_files(tmp_path: Path) -> None:
    directory = make_random_model(
        tmp_path, "gemma2", tokenizer=None, dtype="bfloat16", num_hidden_layers=6, hidden_size=32
    )
    config = AutoConfig.from_pretrained(directory)
    assert (config.num_hidden_layers, config.hidden_size, len(config.layer_types)) == (6, 32, 6)
    assert {tensor.dtype for tensor in read_weights(directory).values()} == {torch.bfloat16}


def test_any_other_architecture_works_with_overrides(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = load(make_random_model(tmp_path, "granite", tokenizer=None, num_key_value_heads=2, **sizes))
    assert model.config.model_type == "granite"
    assert model(random_prompt(5, seed=5)).logits.isfinite().all()


@needs_tokenizer
def test_the_tokenizer_lies_beside_the_model_and_sets_its_vocabulary(tmp_path: Path) -> None:
    directory = make_random_model(tmp_path, "qwen3")
    tokenizer, config = AutoTokenizer.from_pretrained(directory), AutoConfig.from_pretrained(directory)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template
    with pytest.raises(ValueError, match="smaller than the tokenizer"):
        make_random_model(tmp_path / "small", vocab_size=100)


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_architecture"):
        make_random_model(tmp_path, "no_such_architecture", tokenizer=None)
    with pytest.raises(ValueError, match="causal"):
        make_random_model(tmp_path, "t5", tokenizer=None)
    with pytest.raises(ValueError, match="attention heads"):
        make_random_model(tmp_path, tokenizer=None, num_attention_heads=3)
    with pytest.raises(ValueError, match="float99"):
        make_random_model(tmp_path, tokenizer=None, dtype="float99")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        make_random_model(tmp_path, tokenizer=tmp_path)


def test_command_line_makes_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama", str(tmp_path), "--no-tokenizer", "--seed", "3", "--set", "num_hidden_layers=2"]
    assert main([*arguments, "--set", 'rope_parameters={"rope_type": "default", "rope_theta": 500.0}']) == 0
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_hidden_layers == 2
    assert config.rope_parameters["rope_theta"] == 500.0
    assert "MB of weights" in capsys.readouterr().out


def test_command_line_refuses_a_setting_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["llama", "unused", "--set", "hidden_size"])
    assert "KEY=VALUE" in capsys.readouterr().err
