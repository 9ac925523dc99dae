"""Programs that tests run as members end with their test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from fleet.children import is_program

ENDS_S = 10.0
_TEST = "KVFERRY_TEST"
"""Names, to all processes that descend from it, the test that they belong to."""


@pytest.fixture
def leaves_nobody(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No program of `children` that this test has started runs once the test and its other fixtures have ended."""
    mark = f"{os.getpid()} {request.node.nodeid}"
    monkeypatch.setenv(_TEST, mark)
    yield
    deadline = time.monotonic() + ENDS_S  # one that has just been killed may still be there
    while (left := _running(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for one in left:
        one.kill()
    assert not left, f"the test has left {left}"


def _running(mark: str) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if is_program(one.cmdline()) and one.environ().get(_TEST) == mark:
                found.append(one)
    return found
