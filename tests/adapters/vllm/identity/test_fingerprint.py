"""The model's name in vLLM: another for any other weights, and for any other way of computing with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import PromptMaker, connector
from kvferry.core.errors import ConfigError
from kvferry.models.random_model import make_random_model
from support.vllm_process import ENVIRONMENT, VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(400)]

Served = tuple[Path, dict[str, Any]]
"""A model, and vLLM's arguments."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(
        tmp_path_factory.mktemp("named") / "one", "llama", head_dim=32, max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def config_elsewhere(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with another base of the rotary embedding in its config.json."""
    folder = tmp_path_factory.mktemp("configuration")
    config = json.loads((model / "config.json").read_bytes())
    config["rope_parameters"]["rope_theta"] = 10.0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["weights", "configuration"])
def other(request: pytest.FixtureRequest, model: Path, config_elsewhere: Path, tmp_path: Path) -> Served:
    """What differs from `model` in some rows of the embedding, or is the same files with another configuration."""
    if request.param == "configuration":
        return model, {"hf_config_path": str(config_elsewhere)}
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "other"
    shutil.copytree(model, copy)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][3000:] *= -1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy, {}


@contextmanager
def started(served: Served, connector: dict[str, Any] | None) -> Iterator[VllmProcess]:
    process = VllmProcess(served[0], connector, **served[1])
    try:
        yield process.ready()
    finally:
        process.close()


def test_neither_a_store_nor_a_hand_off_brings_kv_of_another_model(
    model: Path, other: Served, prompt_of: PromptMaker, tmp_path: Path
) -> None:
    store = {
        "kv_connector": "KvferrySharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store"), "hand_off": False},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [connector("KvferryP2pConnector"), store]},
    }
    prompts = [prompt_of(length) for length in (40, 200, 333)]
    with started(other, None) as alone:
        right = [alone.run(prompt, 6).token_ids for prompt in prompts]
    with started((model, {}), both) as one, started(other, both) as two:
        assert one.ask("fingerprint") != two.ask("fingerprint")
        assert [one.run(prompt, 6).token_ids for prompt in prompts] != right, "the models do not differ"
        one.settled()
        assert [two.run(prompt, 6).token_ids for prompt in prompts] == right, "from the store"
        two.ask("reset_prefix_cache")
        later = [prompt_of(length) for length in (40, 200, 333)]
        tickets = [one.prefill(prompt, f"t{index}") for index, prompt in enumerate(later)]
        handed = [two.run(prompt, 6, ticket).token_ids for prompt, ticket in zip(later, tickets, strict=True)]
        assert two.settled().figures["lost_LayoutMismatch"] == len(later)
        assert handed == [two.run(prompt, 6).token_ids for prompt in later]


REPLACED = """
from pathlib import Path
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

create = KVConnectorFactory.create_connector

def late(*arguments, **named):
    Path({other!r}).rename({weights!r})
    return create(*arguments, **named)

KVConnectorFactory.create_connector = late
transfer = KVTransferConfig(kv_connector="KvferryP2pConnector", kv_role="kv_both")
LLM({model!r}, dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=2**24,
    kv_transfer_config=transfer)
"""


def test_a_checkpoint_that_is_replaced_while_vllm_loads_it_is_refused(model: Path, tmp_path: Path) -> None:
    """vLLM has the old weights by then, and would have the name of the new ones."""
    folder, other = tmp_path / "model", tmp_path / "other.safetensors"
    shutil.copytree(model, folder)
    shutil.copyfile(model / "model.safetensors", other)
    code = REPLACED.format(model=str(folder), other=str(other), weights=str(folder / "model.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "model.safetensors of" in done.stderr + done.stdout
    assert "changed while the model was loaded" in done.stderr + done.stdout


# By names alone.


@pytest.fixture(scope="module")
def name_of(model: Path) -> Iterator[Callable[..., str]]:
    """The name of `model` as vLLM would run it with these arguments. No engine is started."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in ENVIRONMENT.items():
            patch.setenv(variable, value)
        from vllm.engine.arg_utils import EngineArgs

        from kvferry.adapters.vllm.identity.fingerprint import model_fingerprint

        def name(folder: Path = model, weights: str = "", **engine_args: Any) -> str:
            args = {"dtype": "float32", "max_model_len": 1024} | engine_args
            return model_fingerprint(EngineArgs(model=str(folder), **args).create_engine_config(), weights)

        yield name


def test_what_is_harmless_makes_no_other_name(
    name_of: Callable[..., str], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy") / "of-another-name"
    shutil.copytree(model, copy)
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    (copy / "tokenizer_config.json").write_text("{}")
    plain = name_of()
    same = [
        name_of(copy),
        name_of(tensor_parallel_size=2),
        name_of(hf_config_path=str(copy)),
        name_of(seed=3, served_model_name="x", tokenizer=str(copy), enforce_eager=True, max_logprobs=5),
        name_of(block_size=64, kv_cache_memory_bytes=2**24, enable_prefix_caching=False, max_num_seqs=3),
        name_of(hf_overrides={"rms_norm_eps": 1e-6}, config_format="hf", generation_config="vllm"),
        name_of(enable_lora=True),
    ]
    assert same == [plain] * len(same)


def _another_norm(config: Any) -> Any:
    config.rms_norm_eps = 1e-3
    return config


def test_all_other_settings_of_vllm_count(name_of: Callable[..., str], config_elsewhere: Path) -> None:
    others = [
        name_of(),
        name_of(dtype="bfloat16"),
        name_of(max_model_len=512),
        name_of(hf_config_path=str(config_elsewhere)),
        name_of(hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        name_of(hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}),
        name_of(hf_overrides={"something_new": 1}),
        name_of(hf_overrides=_another_norm),
        name_of(kv_cache_dtype="fp8"),
        name_of(dtype="bfloat16", quantization="experts_int8"),
        name_of(load_format="dummy"),
        name_of(load_format="dummy", tensor_parallel_size=2),
        name_of(load_format="dummy", seed=1),
        name_of(load_format="safetensors"),
        name_of(model_impl="transformers"),
        name_of(model_class_overrides={"A": "b:C"}),
        name_of(disable_sliding_window=True),
        name_of(additional_config={"a": 1}),
        name_of(weights="mine"),
        name_of(weights="mine", hf_config_path=str(config_elsewhere)),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("load_format", ["tensorizer", "runai_streamer"])
def test_weights_from_elsewhere_must_be_named(name_of: Callable[..., str], load_format: str) -> None:
    with pytest.raises(ConfigError, match="model_fingerprint"):
        name_of(load_format=load_format)
    assert name_of(load_format=load_format, weights="one") != name_of(load_format=load_format, weights="two")


def test_all_settings_of_this_release_were_looked_at() -> None:
    """A field that a release adds counts once it is not at its default. One that is gone or renamed is noticed here."""
    import dataclasses

    from vllm import config

    from kvferry.adapters.vllm.identity.fingerprint import NOT_COMPARED

    for name, fields in NOT_COMPARED.items():
        known = {field.name for field in dataclasses.fields(getattr(config, name))}
        assert not set(fields.split()) - known, name
