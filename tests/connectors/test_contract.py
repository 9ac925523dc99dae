"""kvferry's own connectors do what is asked of everybody's."""

import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.testing.connector import CacheContract, HandOffContract


class TestP2p(HandOffContract):
    connector = "P2pConnector"
    takes_early = True


@pytest.mark.full
class TestP2pOverTcp(HandOffContract):
    connector = "P2pConnector"
    takes_early = True

    def extra(self, folder: Path) -> dict[str, Any]:
        return {"transport": "tcp"}


class TestSharedStorage(HandOffContract):
    connector = "SharedStorageConnector"
    takes_early = True

    def extra(self, folder: Path) -> dict[str, Any]:
        # A ticket's second use waits for so long: the first has taken the marker.
        return {"shared_storage_path": str(folder), "timeout_s": 3}


class TestSharedStorageAsACache(CacheContract):
    connector = "SharedStorageConnector"

    def extra(self, folder: Path) -> dict[str, Any]:
        return {"shared_storage_path": str(folder)}


class TestOffloading(CacheContract):
    """Of this instance alone: it cannot hand off at all."""

    connector = "OffloadingConnector"

    def extra(self, folder: Path) -> dict[str, Any]:
        return {"cpu_bytes_to_use": "8MiB"}


class TestMulti(HandOffContract):
    connector = "MultiConnector"
    takes_early = True

    def extra(self, folder: Path) -> dict[str, Any]:
        store = {"kv_connector": "SharedStorageConnector"}
        store["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}  # type: ignore[assignment]
        return {"connectors": [{"kv_connector": "P2pConnector"}, store]}


class TestMultiAsACache(CacheContract):
    connector = "MultiConnector"

    def extra(self, folder: Path) -> dict[str, Any]:
        store = {"kv_connector": "SharedStorageConnector"}
        store["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}  # type: ignore[assignment]
        return {"connectors": [{"kv_connector": "P2pConnector"}, store]}


YESTERDAY = """
from kvferry.connectors.registry import ConnectorSpec

Old = ConnectorSpec("old:OldScheduler", "old:OldWorker")
"""


def test_a_connector_of_yesterday_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "yesterday.py").write_text(YESTERDAY)
    monkeypatch.delitem(sys.modules, "yesterday", raising=False)
    with pytest.raises(ConfigError, match="written for version 1 of the connector API, this kvferry has version 2"):
        find_connector(KVTransferConfig(kv_connector="yesterday:Old"))
