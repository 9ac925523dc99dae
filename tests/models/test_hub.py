"""A model that is not a directory must be on the hub, or in its cache."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from kvferry.core.errors import ConfigError
from kvferry.models.hub import require_on_hub


def test_offline_the_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'nobody/nothing' .*not in the cache \(.*HF_HUB_OFFLINE is set"):
        require_on_hub("nobody/nothing")
