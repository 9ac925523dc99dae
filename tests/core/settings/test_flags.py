"""Flags of settings in a list of arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.flags import overridden, read_flags, to_flags, variable_name
from kvferry.core.settings.model import changed
from kvferry.engine.config import EngineConfig
from kvferry.http.server.config import HttpAccess
from kvferry.router.config import RouterConfig

KINDS = (EngineConfig, RouterConfig, HttpAccess)


def test_flags_in_every_spelling() -> None:
    arguments = [
        *("--dtype", "bfloat16", "--max_num_seqs=4", "--no-prefix-caching", "--trust-remote-code", "--tp=2"),
        *("--seed", "-5", "--model-patch=a", "--model-patch", "b", "--batch-invariant=false"),
        *("--hand-off=concurrent", "--api-key-file", "/a b/c", "--answer-timeout-s=1.5"),
    ]
    values = read_flags("args", arguments, KINDS)
    assert values[EngineConfig] == {
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "prefix_caching": False,
        "trust_remote_code": True,
        "tensor_parallel_size": 2,
        "seed": -5,
        "model_patch": ("a", "b"),
        "batch_invariant": False,
    }
    assert values[RouterConfig] == {"hand_off": "concurrent", "answer_timeout_s": 1.5}
    assert values[HttpAccess] == {"api_key_file": Path("/a b/c")}


def test_of_two_fields_with_one_name_the_first_is_set() -> None:
    assert read_flags("args", ["--max-waiting=7"], KINDS)[EngineConfig] == {"max_waiting": 7}
    assert read_flags("args", ["--max-waiting=7"], KINDS[::-1])[RouterConfig] == {"max_waiting": 7}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--max-num-seq=4"], "args: '--max-num-seq=4' is not a known flag; did you mean '--max-num-seqs'"),
        (["m"], "args: 'm' is not a known flag"),
        (["--"], "args: '--' is not a known flag"),
        (["--no-dtype"], "args: '--no-dtype' is not a known flag"),
        (["--no-page=true"], "args: '--no-page=true' is not a known flag"),
        (["--dtype"], "args: --dtype requires an argument"),
        (["--dtype="], "args: --dtype must not be empty"),
        (["--dtype=float8"], "args: --dtype: 'float8' is not a known value"),
        (["--block-size=0"], "args: --block-size: must be 1 to"),
        (["--block-size=1.5"], "args: --block-size: must be"),
        (["--block-size=" + "9" * 400], "args: --block-size: must be"),
        (["--itl-target-s=nan"], "args: --itl-target-s: must be"),
        (["--itl-target-s=inf"], "args: --itl-target-s: must be"),
    ],
)
def test_errors_name_the_flag(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_flags("args", arguments, KINDS)
    assert str(raised.value).startswith(error)
    assert len(str(raised.value)) < 2000


def test_flags_give_the_same_settings_again() -> None:
    engine = EngineConfig(model="m", max_model_len=99, prefix_caching=False, seed=-5, model_patch=("a b:C", "-x:D"))
    flags = to_flags(changed(engine))
    assert EngineConfig(**read_flags("args", flags, KINDS)[EngineConfig]) == engine
    assert to_flags({"seed": None}) == []


def test_flags_that_others_set_too_are_set_once() -> None:
    arguments = ["m", "--seed=1", "--dtype", "bfloat16", "--no-prefix-caching", "--name=a", "--name=b", "--port=0"]
    assert overridden(arguments, ("--dtype=float32", "--prefix-caching", "--name=c")) == [
        *("m", "--seed=1", "--port=0"),
        *("--dtype=float32", "--prefix-caching", "--name=c"),
    ]
    assert overridden(["--max-num-seqs=4"], ("--max_num_seqs", "8")) == ["--max_num_seqs", "8"]
    assert overridden(arguments, ()) == arguments


def test_names_of_variables() -> None:
    assert variable_name("max_num_seqs") == "KVFERRY_MAX_NUM_SEQS"
