"""How a package shows that its lookup buffer does what one must: `pytest examples`."""

from pathlib import Path

from kvferry.testing.connector import single_hand_off
from kvferry.testing.lookup_buffer import LookupBufferContract

NAME = "in_process_lookup_buffer:InProcessLookupBuffer"


class TestInProcessLookupBuffer(LookupBufferContract):
    lookup_buffer = NAME


def test_engines_hand_off_through_it(tmp_path: Path) -> None:
    single_hand_off(tmp_path, "P2pConnector", {"lookup_buffer": NAME})
