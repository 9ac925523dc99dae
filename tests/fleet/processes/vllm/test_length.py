from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.vllm.length import require_length

PLAIN = {"max_position_embeddings": 4096}


def model(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("flags", [["--max-model-len", "1e9"], ["--max_model_len=12x"], ["--max-model-len=1.5K"]])
def test_what_vllm_cannot_read_is_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len '.*' is no number of tokens that vLLM reads"):
        require_length(flags, model(tmp_path, PLAIN))


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        (["--max-model-len", "1000000000"], PLAIN),
        (["--max_model_len=1g"], PLAIN),
        (["--max-model-len=5K"], PLAIN),
        (["--max-model-len=1k", "--dtype", "float32", "--max-model-len", "4097"], PLAIN),
        (["--max-model-len=4097"], {"text_config": PLAIN}),
        (["--max-model-len=8193"], {**PLAIN, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (["--max-model-len=2049"], {"n_positions": 2048}),
    ],
)
def test_what_the_model_does_not_have_is_refused(flags: list[str], config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len .* is more than the .* tokens that config.json of"):
        require_length(flags, model(tmp_path, config))


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], PLAIN),
        (["--max-model-len"], PLAIN),
        (["--max-model-len", "auto"], PLAIN),
        (["--max-model-len=-1"], PLAIN),
        (["--max-model-len=4K"], PLAIN),
        (["--max-model-len=4.0k"], PLAIN),
        (["--max-model-len=1g", "--max-model-len=4096"], PLAIN),
        (["--max-model-len=8192"], {**PLAIN, "rope_parameters": {"full_attention": {"factor": 2.0}}}),
        (["--max-model-len=1g"], {"max_position_embeddings": None}),
        (["--max-model-len=1g"], {"max_position_embeddings": True}),
        (["--max-model-len=1g"], []),
        (["--max-model-len=1g"], "[" * 100_000),
        (["--max-model-len=1g"], "not JSON"),
    ],
)
def test_what_may_be_right_is_left_to_vllm(flags: list[str], config: Any, tmp_path: Path) -> None:
    require_length(flags, model(tmp_path, config))


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    require_length(["--max-model-len=1g"], "some/model")
    (tmp_path / "config.json").mkdir()
    require_length(["--max-model-len=1g"], str(tmp_path))


def test_vllms_own_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    require_length(["--max-model-len=1g"], model(tmp_path, PLAIN))
