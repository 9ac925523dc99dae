"""How a package shows that its connector does what a connector must: `pytest examples`."""

from pathlib import Path
from typing import Any

from kvferry.testing.connector import HandOffContract


class TestFolderConnector(HandOffContract):
    connector = "folder_connector:FolderConnector"

    def extra(self, folder: Path) -> dict[str, Any]:
        return {"folder": str(folder)}
