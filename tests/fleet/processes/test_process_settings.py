"""Settings that a process is handed when it starts: sealed, read once, and never in a command line."""

from __future__ import annotations

import os

import pytest

from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.process_settings import InstanceProcess, RouterProcess, settings_descriptor
from kvferry.http.server.config import HttpAccess


@pytest.mark.parametrize(
    ("role", "title"), [("both", ("serve", "m")), ("prefill", ("prefill", "m")), ("decode", ("decode", "m"))]
)
def test_a_process_has_a_title(role: str, title: tuple[str, str]) -> None:
    assert InstanceProcess(role=role, engine=EngineConfig(model="m")).title == title  # type: ignore[arg-type]


def test_the_document_cannot_be_changed() -> None:
    settings = RouterProcess(access=HttpAccess(api_key=("sk-secret",)))
    with settings_descriptor(settings) as descriptor:
        content = os.pread(descriptor, 2**20, 0)
        assert b"sk-secret" in content
        with pytest.raises(OSError, match="not permitted"):
            os.write(descriptor, b"x")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(descriptor, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_secrets_are_not_shown() -> None:
    assert "sk-secret" not in repr(RouterProcess(access=HttpAccess(api_key=("sk-secret",))))
