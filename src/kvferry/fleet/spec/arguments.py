"""Flags that a spec must not have, or that belong to another engine."""

from __future__ import annotations

import shlex

from kvferry.core.errors import ConfigError
from kvferry.core.settings.flags import flag_name, flag_of
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.keys import SECRETS

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

VLLM_KEY_VARIABLE = "VLLM_API_KEY"
"""The variable in which vLLM's servers read their key."""
_VLLM_KEY_FLAG = "--api-key"
_MIN_KEY_FLAG = _VLLM_KEY_FLAG.removesuffix("ey")
"""The flag as vLLM's parser spells it, and the shortest abbreviation of it."""


def own_key_flag(argument: str) -> str:
    """The flag of one of `SECRETS` in an argument of kvferry's; empty if it is another."""
    flag = flag_of(argument)
    return flag if flag in map(flag_name, SECRETS) else ""


def vllm_key_flag(argument: str) -> str:
    """The flag for a server's key in an argument of `vllm serve`, which may be cut short; empty if it is another."""
    flag = argument.partition("=")[0].replace("_", "-")
    return _VLLM_KEY_FLAG if _VLLM_KEY_FLAG.startswith(flag) and flag.startswith(_MIN_KEY_FLAG) else ""


def refuse_own_flags(settings: EngineConfig, kind: str) -> None:
    """Raise `ConfigError` for settings of kvferry's own engine beside `--engine kind`, which would be ignored."""
    default = EngineConfig(model=settings.model)
    for name in default.__struct_fields__:
        value = getattr(settings, name)
        if value != getattr(default, name):
            example = shlex.join([flag_name(name), str(value)])
            raise ConfigError(
                f"{flag_name(name)} is a flag of kvferry's own engine; {_ENGINES[kind]}'s flags go after --, as in:"
                f" -- {example}"
            )
