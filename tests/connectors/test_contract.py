"""kvferry's own connectors do what is asked of everybody's."""

from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.connector import ConnectorContract


class TestP2p(ConnectorContract):
    connector = "P2pConnector"
    takes_early = True


@pytest.mark.full
class TestP2pOverTcp(ConnectorContract):
    connector = "P2pConnector"
    takes_early = True

    def extra(self, folder: Path) -> dict[str, Any]:
        return {"transport": "tcp"}


class TestSharedStorage(ConnectorContract):
    connector = "SharedStorageConnector"
    takes_early = True

    def extra(self, folder: Path) -> dict[str, Any]:
        # A ticket's second use waits for so long: the first has taken the marker.
        return {"shared_storage_path": str(folder), "timeout_s": 3}


class TestMulti(ConnectorContract):
    connector = "MultiConnector"
    takes_early = True

    def extra(self, folder: Path) -> dict[str, Any]:
        store = {"kv_connector": "SharedStorageConnector"}
        store["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}  # type: ignore[assignment]
        return {"connectors": [{"kv_connector": "P2pConnector"}, store]}

    def test_it_says_that_it_hands_off_or_that_it_is_a_cache(self) -> None:
        """It is what its connectors are."""
