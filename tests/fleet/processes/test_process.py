"""Processes of members: their environment, and progress in their logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.fleet.processes.process import ExternalServer, ProcessSpec
from kvferry.fleet.processes.ready import READY_FLAG, StartProgress


def test_the_first_pattern_that_matches_tells_the_progress() -> None:
    half, done = StartProgress(0.5, "half"), StartProgress(1.0, "done")
    server = ExternalServer("http://a:1", ((re.compile("load"), half), (re.compile("loaded"), done)))
    assert server.progress_of("it has loaded") is half
    assert server.progress_of("nothing") is None


def test_the_environment_is_inherited_but_for_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_PARENT", "x")
    monkeypatch.setenv("KEPT", "y")
    spec = ProcessSpec("a", ("true",), environment={"OWN": "z", "KEPT": "w"}, hidden=frozenset({"SECRET_OF_PARENT"}))
    environment = spec.full_environment()
    assert "SECRET_OF_PARENT" not in environment
    assert (environment["OWN"], environment["KEPT"], environment["PYTHONUNBUFFERED"]) == ("z", "w", "1")


def test_sockets_go_to_the_members_folder_unless_a_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOCKETS_OF_IT", raising=False)
    spec = ProcessSpec("a", ("true",), foreign=ExternalServer("http://a:1", sockets_in="SOCKETS_OF_IT"))
    assert spec.full_environment(Path("/run/x"))["SOCKETS_OF_IT"] == "/run/x"
    assert "SOCKETS_OF_IT" not in spec.full_environment()
    assert "SOCKETS_OF_IT" not in spec.full_environment(tmp_path / ("x" * 100)), "its sockets would have no name"
    monkeypatch.setenv("SOCKETS_OF_IT", "/mine")
    assert spec.full_environment(Path("/run/x"))["SOCKETS_OF_IT"] == "/mine"


def test_only_kvferrys_processes_get_a_descriptor_for_their_messages() -> None:
    with ProcessSpec("a", ("program",), descriptors=(7,)).started_with(5) as (command, inherited):
        assert command == ("program", READY_FLAG, "5")
        assert inherited == (5, 7)
    foreign = ProcessSpec("a", ("program",), foreign=ExternalServer("http://a:1"), descriptors=(7,))
    with foreign.started_with(5) as (command, inherited):
        assert (command, inherited) == (("program",), (7,))
