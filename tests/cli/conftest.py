"""A command line without torch, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.torch_blocked import TorchBlocked, torch_blocked


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchBlocked]:
    """Where commands are run with torch blocked."""
    with torch_blocked(tmp_path_factory.mktemp("blocked")) as made:
        yield made
