"""A checkpoint that is not whole is refused at start, in one line that names what is wrong."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.core.errors import ConfigError, KvferryError
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.attention import ATTENTION_NAME
from kvferry.engine.model.loader import LoadedModel, MappedFiles, load_model
from kvferry.models.random_model import make_random_model

WEIGHTS = "model.safetensors"


def load(folder: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))


def explain_mismatch(folder: Path) -> str:
    with pytest.raises(KvferryError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_random_model(tmp_path / "model", "llama", num_hidden_layers=2)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_layers_that_the_file_lacks_are_named(folder: Path) -> None:
    change_config(folder, num_hidden_layers=6)
    assert "model.layers.2.mlp.up_proj.weight and 35 others are missing from" in explain_mismatch(folder)


def test_one_missing_weight_is_named(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    assert "model.layers.1.self_attn.q_proj.weight is missing from" in explain_mismatch(folder)


def test_another_familys_config_is_not_served_with_random_weights(folder: Path) -> None:
    change_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=64, n_layer=2, n_head=4)
    assert "missing from" in explain_mismatch(folder)


def test_weights_that_nothing_takes_are_named(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.7.extra.weight": torch.ones(3)}))
    assert "model.layers.7.extra.weight is in" in explain_mismatch(folder)


def test_more_layers_than_the_config_says_are_told(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    assert "model.layers.1.mlp.up_proj.weight and 8 others are in" in explain_mismatch(folder)


def test_a_shape_that_is_not_the_configs_is_told(folder: Path) -> None:
    change_config(folder, intermediate_size=120)
    text = explain_mismatch(folder)
    assert "model.layers.0.mlp.down_proj.weight and 5 others" in text
    assert "([64, 128], not [64, 120])" in text


def test_tied_weights_need_not_be_stored(tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "tied", "llama", num_hidden_layers=2, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    assert load(folder).vocab_size > 0


def test_buffers_of_older_checkpoints_are_no_weights(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert load(folder).vocab_size > 0


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_cut_off_is_told(share: float, folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(len(data) * share)])
    explain_mismatch(folder)


@pytest.mark.parametrize("damage", [b"\xff" * 8, b"\x00" * 8, b"not a number of bytes"])
def test_a_header_that_cannot_be_read_is_told(damage: bytes, folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(damage + data[len(damage) :])
    explain_mismatch(folder)


def test_weights_that_are_no_numbers_are_told(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(KvferryError, match="logits that are not finite"):
        load(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"model_type": 3}', '{"model_type": "nosuch"}', "\xff", '{"a": "\\ud800"}']
)
def test_a_config_that_cannot_be_read_is_told(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    explain_mismatch(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": -1},
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"max_position_embeddings": None},
        {"rope_parameters": {"rope_type": "nosuch"}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["nosuch", "nosuch"]},
        {"hidden_act": "nosuch"},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_told_in_one_line(values: dict[str, Any], folder: Path) -> None:
    change_config(folder, **values)
    with pytest.raises(KvferryError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_told(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    explain_mismatch(folder)


def test_a_shard_that_is_not_there_is_told(tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "sharded", "llama", max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=shards[1].name):
        load(folder)


# Files that contradict each other.


def split(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda index: None) -> None:
    """Into two files, with an index that `change` may spoil."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(weight_map.values()):
        own = {name: tensor for name, tensor in tensors.items() if weight_map[name] == part}
        save_file(own, folder / part, metadata={"format": "pt"})
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    change(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def twice(folder: Path, factor: float) -> None:
    """The final norm, which is in the one file, is in the other too."""
    split(folder)
    norm = "model.norm.weight"
    parts = {name: load_file(folder / name) for name in ("part-0.safetensors", "part-1.safetensors")}
    [weight] = [tensors[norm] for tensors in parts.values() if norm in tensors]
    for name, tensors in parts.items():
        if norm not in tensors:
            save_file(tensors | {norm: weight * factor}, folder / name, metadata={"format": "pt"})


def test_a_weight_that_two_files_have_is_refused_unless_it_is_the_same(folder: Path) -> None:
    twice(folder, 2.0)
    text = explain_mismatch(folder)
    assert "model.norm.weight is in part-0.safetensors and in part-1.safetensors" in text
    assert "with other values" in text


def test_a_weight_that_two_files_have_alike_is_loaded(folder: Path) -> None:
    twice(folder, 1.0)
    load(folder)


@pytest.mark.parametrize("name", ["nowhere.safetensors", "../model/part-0.safetensors", "/etc/passwd"])
def test_a_file_that_is_not_beside_its_index_is_named(folder: Path, name: str) -> None:
    split(folder, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    assert f"names {name!r}, which is not in the same directory" in explain_mismatch(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none_is_told(folder: Path, index: Any) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "does not say which weights are in which file" in explain_mismatch(folder)


@pytest.mark.parametrize(("kind", "name"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.complex64, "C64")])
def test_weights_that_are_no_floating_point_numbers_are_refused(folder: Path, kind: torch.dtype, name: str) -> None:
    tensor = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({tensor: tensors[tensor].to(kind)}))
    assert f"{tensor} in {WEIGHTS} of {str(folder)!r} is stored as {name}" in explain_mismatch(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_file_that_ends_early_is_named(folder: Path, keep: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{str(path)!r} cannot be read" in explain_mismatch(folder)


def test_a_git_lfs_pointer_is_named_as_such(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n")
    assert "is a Git LFS pointer and not the weights; run `git lfs pull`" in explain_mismatch(folder)


def test_a_model_without_room_for_an_answer_is_refused(folder: Path) -> None:
    change_config(folder, max_position_embeddings=1)
    with pytest.raises(KvferryError, match=r"max_position_embeddings .* is 1"):
        load(folder)


def test_what_transformers_says_of_a_configuration_is_told_to_the_end(folder: Path) -> None:
    change_config(folder, num_attention_heads=3)
    assert "validate_architecture': ValueError: The hidden size (64)" in explain_mismatch(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', '{"eos_token_id": [1, 2'])
def test_a_generation_config_that_is_damaged_is_not_passed_over(folder: Path, text: str) -> None:
    path = folder / "generation_config.json"
    path.write_text(text)
    assert f"{str(path)!r} cannot be read" in explain_mismatch(folder)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 100, got -1"),
        ({"temperature": "hot"}, "Expected `float`, got `str` - at `$.temperature`"),
        ({"temperature": math.nan}, "temperature must be between 0 and 100, got nan"),
        ({"top_k": -7}, "top_k must be at least -1"),
        ({"top_p": 0}, "top_p must be greater than 0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between"),
        ({"eos_token_id": "2"}, "eos_token_id: Expected `int | array | null`, got `str`"),
        ({"eos_token_id": [2, None]}, "eos_token_id: Expected `int`, got `null`"),
    ],
    ids=str,
)
def test_what_no_request_could_be_served_with_is_told_at_start(folder: Path, values: dict[str, Any], told: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert told in explain_mismatch(folder)


def test_settings_that_are_null_or_of_another_library_are_passed_over(folder: Path) -> None:
    values = {"temperature": None, "top_p": 0.5, "eos_token_id": [2, 10**9], "num_beams": "many", "top_h": None}
    (folder / "generation_config.json").write_text(json.dumps(values))
    loaded = load(folder)
    assert loaded.default_sampling == {"top_p": 0.5}
    assert 2 in loaded.eos_token_ids
    assert max(loaded.eos_token_ids) < loaded.vocab_size, "min_tokens forbids them by their place"


# What the files become later.


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    """Of a few tokens, without KV: the model's own attention is in place of the paged one."""
    loaded.module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = loaded.module(torch.arange(5, 21)[None], use_cache=False).logits
    loaded.module.set_attn_implementation(ATTENTION_NAME)
    return torch.as_tensor(logits)


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("name", [WEIGHTS, "pytorch_model.bin"])
def test_weights_are_those_that_were_loaded_whatever_becomes_of_the_file(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """It is overwritten in place with another training state, and then truncated."""
    other = make_random_model(tmp_path / "other", "llama", num_hidden_layers=2, seed=1)
    if name != WEIGHTS:
        as_pickle(folder)
        as_pickle(other)
    loaded = load(folder)
    gc.collect()
    assert str(folder / name) not in MappedFiles().paths
    before = logits_of(loaded)
    with (folder / name).open("r+b") as file:
        file.write((other / name).read_bytes())
    assert torch.equal(logits_of(loaded), before)
    os.truncate(folder / name, 100)
    assert torch.equal(logits_of(loaded), before)


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_refused(folder: Path, tmp_path: Path) -> None:
    """It would compute with the old weights under the new ones' name."""
    other = make_random_model(tmp_path / "other", "llama", num_hidden_layers=2, seed=1)

    def replace(what: str, share: float) -> None:
        if what == "patching the model":
            (other / WEIGHTS).rename(folder / WEIGHTS)

    with pytest.raises(ConfigError, match=r"model.safetensors of .* changed while the model was loaded"):
        load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"), on_progress=replace)
