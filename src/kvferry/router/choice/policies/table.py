"""Policies by name. A new one is one file and one line here, or an entry point of another package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import ExtensionPoint
from kvferry.core.settings.bounds import require_number
from kvferry.router.choice.policies.base import Policy, PolicyContext

POLICIES = {
    "cost": "kvferry.router.choice.policies.cost:Cost",
    "least_loaded": "kvferry.router.choice.policies.least_loaded:LeastLoaded",
    "power_of_two": "kvferry.router.choice.policies.power_of_two:PowerOfTwo",
    "prefix": "kvferry.router.choice.policies.prefix:PrefixAware",
    "random": "kvferry.router.choice.policies.random:RandomChoice",
    "round_robin": "kvferry.router.choice.policies.round_robin:RoundRobin",
    "session": "kvferry.router.choice.policies.session:SessionAffinity",
}
EXTENSIONS = ExtensionPoint("--policy", POLICIES, "kvferry.policies")


def make_policy(name: str, context: PolicyContext, options: Sequence[str] = ()) -> Policy:
    """Create the policy with this name, with options such as `pressure=0.1`. Raises the errors of `find_policy` and
    `read_settings`."""
    kind = find_policy(name)
    return kind(context, read_settings(name, kind, options))


def find_policy(name: str) -> type[Policy]:
    """The class with this name. Raises `UnknownName`, or `ConfigError` if it is not a policy."""
    policy: type[Policy] = EXTENSIONS.find(name, Policy)
    return policy


def policy_names() -> list[str]:
    """The names of all policies."""
    return EXTENSIONS.names()


def read_settings(name: str, kind: type[Policy], options: Sequence[str]) -> Any:
    """A policy's own settings. Raises `ConfigError` for an option that the policy does not have, or a value of the
    wrong type."""
    values: dict[str, str] = {}
    for key, value in map(_split, options):
        if key in values:
            raise ConfigError(f"--policy-option {key} is given twice")
        values[key] = value
    known_options = [option_field.name for option_field in fields(kind.Settings)] if is_dataclass(kind.Settings) else []
    for key in values.keys() - set(known_options):
        raise UnknownName(f"--policy-option of {name}", key, known_options)
    try:
        settings = msgspec.convert(values, kind.Settings, strict=False) if known_options else kind.Settings()
    except msgspec.ValidationError as error:
        raise ConfigError(f"--policy-option of {name}: {error}") from error
    for option in values:
        require_number(f"--policy-option of {name}: {option}", getattr(settings, option))
    return settings


def _split(option: str) -> tuple[str, str]:
    key, equals, value = option.partition("=")
    if not equals or not key:
        raise ConfigError(f"--policy-option {option!r} must be name=value")
    return key.strip().replace("-", "_"), value.strip()
