"""No number that makes no sense gets past the command line, the file or an option's JSON: found by looking through all
commands, so that a flag that is new is tested too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from cyclopts import Argument

from docs_site import commands
from kvferry.cli.flags import complete, flags_of
from kvferry.cli.main import main
from kvferry.connectors.registry import BUILTIN as CONNECTORS
from kvferry.core.errors import ConfigError
from kvferry.core.names import resolve
from kvferry.core.settings.bounds import Bounds, bounds_of, check_bounds
from kvferry.core.settings.flags import flag_name
from kvferry.core.settings.options import read_options
from kvferry.engine.config import EngineConfig
from kvferry.engine.server.config import ServerConfig
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import FleetShapeSettings, ListenSettings
from kvferry.http.server.config import HttpAccess, HttpConfig
from kvferry.http.server.limits import HttpLimits
from kvferry.router.choice.policies.table import find_policy, policy_names, read_settings
from kvferry.router.config import RouterConfig
from kvferry.router.edge.tenants import Limits
from kvferry.store.table import BUILTIN as STORES
from kvferry.store.table import find_store

CONFIGS = [EngineConfig, FleetShapeSettings, HttpAccess, HttpLimits, ListenSettings, RestartPolicy, RouterConfig]
MORE = [HttpConfig, ServerConfig]
"""Settings that are no flags, or not under their own name."""

NO_QUANTITIES = {"listeners"}
"""File descriptors."""

SIZES = {"--max-body", "--max-buffered", "--kv-cache-memory", "--capacity", "--disaggregate-from"}
"""Numbers that are written as text."""

FIRST = {
    "serve": ["m"], "prefill": ["m"], "decode": ["m"], "router": ["--decode-url", "http://127.0.0.1:9"],
    "fleet add": ["decode", "http://127.0.0.1:9"], "fleet drain": ["x"],
    "fleet apply": ["x"], "fleet scale": ["x", "prefill=1"], "fleet roll": ["x"], "fleet rollback": ["x"],
    "fleet resume": ["x"], "fleet delete": ["x"],
    "cache warm": ["-", "--model", "m", "--store", "file:/x"], "cache simulate": ["nowhere"],
    "simulate": ["nowhere", "--trace", "nowhere"], "calibrate": ["m"], "plan": ["nowhere"], "why": ["http://127.0.0.1:9"],
    "ask": ["http://127.0.0.1:9", "x"], "chat": ["http://127.0.0.1:9"], "bench": ["http://127.0.0.1:9"],
    "trace record": ["http://127.0.0.1:9"],
}  # fmt: skip
"""What a command needs besides, so that the number is all that is wrong."""

HUGE = "9" * 400


def types_in(hint: Any) -> set[Any]:
    """The plain types in an annotation."""
    parts = [hint.__args__[0]] if get_origin(hint) is Annotated else list(get_args(hint))
    return set().union(*map(types_in, parts)) if parts else {hint}


def numbers() -> list[tuple[str, Argument]]:
    """Every flag with a number of every command."""
    return [
        (name, flag)
        for name, command in commands.commands().items()
        for flag in commands.flags(command)
        if types_in(flag.hint) & {int, float} or flag.name in SIZES
    ]


def cases() -> Iterator[Any]:
    """Each flag once for each class of settings, as reading a command line takes a while; those that belong to no class
    of settings at every command that has one."""
    owned = {flag_name(name) for config in CONFIGS for name in config.__struct_fields__}
    seen: set[str] = set()
    for name, flag in numbers():
        if flag.name not in owned & seen:
            seen.add(flag.name)
            yield pytest.param(name, flag, id=f"{name} {flag.name}")


@pytest.mark.parametrize(("command", "flag"), list(cases()))
def test_flags(command: str, flag: Argument, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by name, with one line, before anything starts: what would start finds no model and no router."""
    is_whole = float not in types_in(flag.hint) and flag.name not in SIZES
    for value in [HUGE, "1.5", "-70000.6"] if is_whole else ["inf" if float in types_in(flag.hint) else HUGE]:
        code = main([*command.split(), *FIRST.get(command, []), f"{flag.name}={value}"])
        told = capsys.readouterr().err
        assert (code, told.count("\n")) == (2, 1), told
        assert flag.name in told
        assert len(told) < 600


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: one.__name__)
def test_settings(config: Any) -> None:
    needed = {"model": "m"} if config is EngineConfig else {}
    for name, bounds in bounds_of(config).items():
        wrong = [bounds.min_value - 1, bounds.max_value * 2, 10**400, -(10**400), math.inf, -math.inf, math.nan]
        for value in [*wrong, bounds.min_value] if bounds.above else wrong:
            given = (value,) if isinstance(getattr(config, name), tuple) else value
            with pytest.raises(ConfigError, match=f"^{flag_name(name)} must be|^{flag_name(name)} must not be"):
                complete(config, flags_of(config, needed)(**{name: given}), **needed)


def test_all_flags_with_numbers_are_found() -> None:
    names = {flag.name for _, flag in numbers()}
    assert names >= {"--grace-s", "--max-in-flight", "--wait-s", "--block-tokens", "--bootstrap-port", "--timeout-s"}
    assert names >= SIZES


@pytest.mark.parametrize("config", CONFIGS + MORE, ids=lambda one: one.__name__)
def test_every_number_of_the_settings_has_bounds(config: type) -> None:
    plain = {name for name, hint in get_type_hints(config).items() if types_in(hint) & {int, float}}
    assert plain - NO_QUANTITIES == set(bounds_of(config))


def bounded(hint: Any) -> bool:
    if get_origin(hint) is Annotated and any(isinstance(one, msgspec.Meta) for one in hint.__metadata__):
        return True
    return any(map(bounded, get_args(hint)))


def option_classes() -> list[Any]:
    connectors = {resolve(spec.options) for spec in CONNECTORS.values() if spec.options}
    stores = {resolve(path).options_type for path in set(STORES.values())}
    return sorted(connectors | stores | {Limits}, key=lambda one: one.__name__)


@pytest.mark.parametrize("kind", option_classes(), ids=lambda one: one.__name__)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400], ids=["inf", "-inf", "nan", "huge"])
def test_options_of_connectors_and_stores(kind: Any, value: float) -> None:
    """As JSON's numbers, and as text, which a store's URL has."""
    found = [one for one in msgspec.structs.fields(kind) if types_in(one.type) & {int, float}]
    for one in found:
        for written in (value, str(value)):
            if isinstance(written, str) and str in types_in(one.type):
                continue  # a size, read by `parse_bytes`
            with pytest.raises(ConfigError, match=one.encode_name):
                read_options(kind, {one.encode_name: written})


@pytest.mark.parametrize(
    "url",
    [
        "memory:?num_blocks=-1", "memory:4GiB?threads=0", "memory:4GiB?threads=1000000", "file:/x?threads=0",
        "file:/x?deadline_s=nan", "file:/x?deadline_s=inf", "file:/x?max_bytes=0", "valkey://h:1?ttl_s=inf",
        "valkey://h:1?ttl_s=1e300", "valkey://h:1?ttl_s=0", "file:/x?pinned_share=nan", "file:/x?deadline_s=0",
    ],
)  # fmt: skip
def test_stores(url: str) -> None:
    option = url.partition("?")[2].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{option}: must be"):
        find_store(url)


@pytest.mark.parametrize("name", policy_names())
def test_policies(name: str) -> None:
    kind = find_policy(name)
    for option, hint in get_type_hints(kind.Settings).items():
        if float in types_in(hint):
            for value in ("inf", "nan", "-inf"):
                with pytest.raises(ConfigError, match=option):
                    read_settings(name, kind, [f"{option}={value}"])


@pytest.mark.parametrize(
    ("bounds", "value", "told"),
    [
        (Bounds(1, 2**40), 0, "must be at least 1, got 0"),
        (Bounds(0, 2**40), -1, "must not be negative, got -1"),
        (Bounds(0, 2**40, above=True), 0, "must be above 0, got 0"),
        (Bounds(0, 2**40), math.inf, "must be at most 1099511627776, got inf"),
        (Bounds(0, 65535), 65536, "must be between 0 and 65535, got 65536"),
        (Bounds(0, 2**40), math.nan, "must be a number, got nan"),
        (Bounds(0, 2**40), 10**99, "got 100000000000… (100 digits)"),
    ],
)
def test_what_is_said(bounds: Bounds, value: float, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bounds.require("--x", value)
    assert str(raised.value).startswith("--x must ")
    assert told in str(raised.value)


def test_the_bounds_themselves_are_within() -> None:
    for bounds in (Bounds(1, 5), Bounds(0, 5)):
        bounds.require("--x", bounds.min_value)
        bounds.require("--x", bounds.max_value)
    for config in (FleetShapeSettings(), ListenSettings(), RouterConfig(), HttpConfig()):
        check_bounds(config)


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (["serve", "m"], {"KVFERRY_DECODE": "1.2"}, "KVFERRY_DECODE must be a whole number, got 1.2"),
        (["router", "--bootstrap-port=8998", "--bootstrap-port=1.1"], {}, "--bootstrap-port must be a whole number"),
        (["serve", "m", "--prefill", "0", "--decode", "1"], {}, "--prefill 0 with --decode 1: a fleet has at least"),
        (["serve", "m", "--decode", "0", "--prefill", "2"], {}, "--decode 0 with --prefill 2: a fleet has at least"),
    ],
)
def test_a_number_that_was_given_is_used_or_refused_and_never_replaced(
    arguments: list[str],
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_fraction_in_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvferry.toml").write_text("[serve]\nprefill = 1.5\n")
    assert main(["--config", str(tmp_path / "kvferry.toml"), "serve", "m"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be a whole number, got 1.5" in line
