"""Each environment variable that sets a flag is read, or refused, by each command that starts what has that flag."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from kvferry.cli.flag_sources import FROM_A_SPEC, STARTS, STARTS_NOTHING, Command, refuse_unread
from kvferry.cli.main import app, main
from kvferry.core.errors import ConfigError
from kvferry.fleet.spec.variables import flag_variables, variables_of

SPEC = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[role.prefill]
[role.decode]
[router]
port = 0
"""


@pytest.fixture(autouse=True)
def _no_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in flag_variables():
        monkeypatch.delenv(name, raising=False)


def commands(group: App, path: Command = ()) -> Iterator[Command]:
    for name in group:
        if name.startswith("-"):
            continue
        if group[name].default_command is None:
            yield from commands(group[name], (*path, name))
        else:
            yield (*path, name)


def flags(command: Command) -> set[str]:
    """The variables of a command's own flags."""
    leaf = app
    for name in command:
        leaf = leaf[name]
    names = (name for one in leaf.assemble_argument_collection(parse_docstring=False) for name in one.names)
    return {f"KVFERRY_{name.lstrip('-').replace('-', '_').upper()}" for name in names}


def test_each_command_says_what_it_starts() -> None:
    assert set(commands(app)) == {*STARTS, *STARTS_NOTHING}


@pytest.mark.parametrize("command", STARTS, ids=" ".join)
def test_a_variable_is_read_or_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    own = flags(command)
    for variable in sorted(variables_of(STARTS[command])):
        monkeypatch.setenv(variable, "1")
        if variable in own or variable == "KVFERRY_VERBOSE":  # which changes nothing that is started
            refuse_unread(command, app)
        else:
            with pytest.raises(ConfigError, match=rf"^{variable} is set, and `kvferry {' '.join(command)}` does not"):
                refuse_unread(command, app)
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("command", FROM_A_SPEC, ids=" ".join)
@pytest.mark.parametrize("variable", ["KVFERRY_API_KEY", "KVFERRY_ADMIN_KEY", "KVFERRY_TLS_CERT", "KVFERRY_CONFIG"])
def test_a_spec_is_not_completed_by_the_environment(
    command: Command,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The endpoint would be open, where `kvferry serve` with the same variables asks for the key."""
    spec, state = tmp_path / "chat.toml", tmp_path / "state"
    spec.write_text(SPEC)
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(state))
    monkeypatch.setenv(variable, "a-key-of-the-deployment")
    more = ["--router", "http://127.0.0.1:9"] if command[-1] == "recommend" else []
    assert main([*command, str(spec), *more]) == 2
    error = capsys.readouterr().err
    assert ("--config" if variable == "KVFERRY_CONFIG" else variable) in error
    assert "a-key-of-the-deployment" not in error
    assert not state.exists()
    if "KEY" in variable:
        assert "_key_file in [router]" in error


def test_help_is_shown_whatever_is_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", "k")
    assert main(["fleet", "apply", "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_a_model_that_is_shown_is_not_shown_to_everybody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_HOST", socket.gethostname())
    assert main(["demo"]) == 2
    assert "KVFERRY_HOST is set, and `kvferry demo` does not read it" in capsys.readouterr().err
