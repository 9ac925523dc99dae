"""How a package shows that its fabric does what one must: `pytest examples`."""

from pathlib import Path

from kvferry.testing.connector import single_hand_off
from kvferry.testing.fabric import FabricContract

NAME = "process_memory_fabric:ProcessMemoryFabric"


class TestProcessMemoryFabric(FabricContract):
    transport = NAME


def test_engines_hand_off_over_it(tmp_path: Path) -> None:
    single_hand_off(tmp_path, "P2pConnector", {"transport": NAME})
