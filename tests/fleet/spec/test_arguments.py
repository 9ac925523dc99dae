"""Flags that a spec must not have: keys, under any spelling, and flags of another engine."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.arguments import own_key_flag, refuse_own_flags, vllm_key_flag


@pytest.mark.parametrize("argument", ["--api-key", "--api-key=secret", "--admin-key=x"])
def test_keys_of_kvferrys_are_found(argument: str) -> None:
    assert own_key_flag(argument) == argument.partition("=")[0]


@pytest.mark.parametrize("argument", ["", "--port", "8000", "--api-key-file=x", "api-key"])
def test_other_arguments_are_no_keys(argument: str) -> None:
    assert own_key_flag(argument) == ""


@pytest.mark.parametrize("argument", ["--api-key", "--api_key", "--api-k", "--api-ke=x"])
def test_vllms_key_is_found_however_it_is_cut_short(argument: str) -> None:
    assert vllm_key_flag(argument) == "--api-key"


@pytest.mark.parametrize("argument", ["--api", "--api-", "--api-keys", "--port", "-a", ""])
def test_what_is_not_vllms_key_is_none(argument: str) -> None:
    assert vllm_key_flag(argument) == ""


def test_flags_of_the_own_engine_are_refused_beside_another() -> None:
    refuse_own_flags(EngineConfig(model="m"), "vllm")
    with pytest.raises(ConfigError, match=r"--block-size is a flag of kvferry's own engine; SGLang's flags go after"):
        refuse_own_flags(EngineConfig(model="m", block_size=8), "sglang")
