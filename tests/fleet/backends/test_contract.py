"""kvferry's own backends hold the contract of backends."""

from __future__ import annotations

import pytest

from kvferry.testing.backends import BackendContract


@pytest.mark.processes
class TestLocal(BackendContract):
    kind = "local"
