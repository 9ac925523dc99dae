"""What this machine has, and what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.host.machine import require_disk_space, require_memory


def test_who_asks_for_more_than_there_is_is_named(tmp_path: Path) -> None:
    require_memory(1, "a little")
    require_disk_space(tmp_path, 1, "a little")
    with pytest.raises(ConfigError, match=r"^too much: this machine has [0-9.]+ "):
        require_memory(2**62, "too much")
    with pytest.raises(ConfigError, match=rf"^too much: {tmp_path} has [0-9.]+ \S+ left; make room there"):
        require_disk_space(tmp_path, 2**62, "too much")
