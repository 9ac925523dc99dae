"""Settings as command-line arguments: from a dataclass back to the flags that are made from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

KEY_FIELDS = ("api_key", "admin_key", "instance_api_key")
"""Settings that are secrets. Everyone on a machine can read command lines, so they travel in the environment, or as
the names of files."""

VLLM_KEY_VARIABLE = "VLLM_API_KEY"
"""The variable in which vLLM's servers read their key."""
_VLLM_KEY_FLAG = "--api-key"
_MIN_KEY_FLAG = _VLLM_KEY_FLAG.removesuffix("ey")
"""As vLLM's parser spells it, and the shortest that may mean it."""


def own_key_flag(argument: str) -> str:
    """The flag of one of `KEY_FIELDS` in an argument of kvferry's; empty if it is another."""
    flag = _said(argument)
    return flag if flag in map(flag_name, KEY_FIELDS) else ""


def vllm_key_flag(argument: str) -> str:
    """The flag for a server's key in an argument of `vllm serve`, which may be cut short; empty if it is another."""
    flag = argument.partition("=")[0].replace("_", "-")
    return _VLLM_KEY_FLAG if _VLLM_KEY_FLAG.startswith(flag) and flag.startswith(_MIN_KEY_FLAG) else ""


def to_arguments(config: Any, without: Iterable[str] = ()) -> list[str]:
    """Flags that give the same `config`. Fields that are None, and those in `without`, are left out."""
    skipped = set(without)
    return [
        argument
        for field in fields(config)
        if field.name not in skipped
        for argument in _flag(field.name, getattr(config, field.name))
    ]


def overridden(arguments: Iterable[str], others: Sequence[str]) -> list[str]:
    """`arguments` without the flags that `others` say too, and their values; then `others`."""
    said = {_said(one) for one in others}
    kept, is_said = list[str](), False
    for one in arguments:
        is_said = _said(one) in said if one.startswith("--") else is_said
        if not is_said:
            kept.append(one)
    return [*kept, *others]


def _said(argument: str) -> str:
    """The flag in an argument, whichever way it says it."""
    return argument.partition("=")[0].replace("_", "-").replace("--no-", "--")


def refuse_own_flags(settings: EngineConfig, kind: str) -> None:
    """Raise `ConfigError` for settings of kvferry's own engine beside `--engine kind`, which would be ignored."""
    default = EngineConfig(model=settings.model)
    for name in vars(default):
        value = getattr(settings, name)
        if value != getattr(default, name):
            example = shlex.join([flag_name(name), str(value)])
            raise ConfigError(
                f"{flag_name(name)} is a flag of kvferry's own engine; {_ENGINES[kind]}'s flags go after --, as in:"
                f" -- {example}"
            )


def flag_name(field: str) -> str:
    """The flag of a field, as cyclopts spells it."""
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    """The environment variable of a field's flag."""
    return "KVFERRY_" + field.upper()


def _flag(field: str, value: Any) -> Iterator[str]:
    name = flag_name(field)
    if value is None:
        return
    if isinstance(value, bool):
        yield name if value else "--no-" + name.removeprefix("--")
    elif isinstance(value, tuple):
        for item in value:
            yield f"{name}={item}"
    else:
        yield f"{name}={value}"
