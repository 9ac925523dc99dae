"""Names of the interface of caches that connectors of other packages may still use."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvferry.connectors.caching import KeepsBlocks
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.messages.kept import TierShare
from kvferry.core.settings.transfer_config import KVTransferConfig


def test_the_former_name_of_stored_blocks_holds() -> None:
    answers: list[Future[list[TierShare]]] = [Future()]

    class Former(KeepsBlocks[Any]):
        @classmethod
        def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
            return ()

        def reset_cache(self) -> bool:
            return True

        def kept(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
            return answers

    class Derived(Former):
        pass

    assert Derived().stored_blocks([], pin=None) is answers
