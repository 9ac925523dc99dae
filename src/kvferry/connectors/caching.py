"""The interface of caches, connectors that keep blocks for reuse by their hash. Their scheduler side also derives from
`KeepsBlocks`, and their worker side from `StoresBlocks`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic

from kvferry.connectors.api import Plan
from kvferry.connectors.registry import ConnectorSpec
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.messages.kept import TierShare
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.store.activity import Changes


class KeepsBlocks(ABC, Generic[Plan]):
    """A scheduler side that keeps blocks for reuse, by their hash."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Accept a method `kept`, the deprecated name of `stored_blocks`."""
        super().__init_subclass__(**arguments)
        if "kept" in cls.__dict__ and "stored_blocks" not in cls.__dict__:
            cls.stored_blocks = cls.kept  # type: ignore[method-assign]

    @classmethod
    @abstractmethod
    def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
        """The names of the lossy codecs of its stores, through which loaded KV may not be exact. Raises
        `ConfigError`."""

    def saves(self, plan: Plan | None) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        """The blocks that a plan stores: for each request id, consecutive blocks of its prompt. Default: not known."""
        return ()

    def stored_blocks(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        """The share of these blocks that each tier of each store has. They are pinned if `pin` is True, and unpinned if
        False. Unless `pin` is False, the next request for exactly these blocks stores the missing ones, even if the
        engine's prefix cache has them. Raises `InvalidRequest` if this instance only loads. The futures raise
        `StoreError`. Default: not known."""
        return ()

    def kept(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        """Deprecated name of `stored_blocks`."""
        return KeepsBlocks.stored_blocks(self, hashes, pin=pin)

    def keeps_keys(self) -> bool:
        """True if requests can store and load KV under their own keys (`RequestView.transfer_params`). Default:
        False."""
        return False

    @abstractmethod
    def reset_cache(self) -> bool:
        """Drop all KV that is kept for reuse, because the weights have changed. Returns False if this is not
        possible."""


@dataclass
class StoreEvents:
    """Events of the blocks that a worker side keeps in a store, since the last call.

    `stored`: blocks that the store has now. `dropped`: blocks that were to be stored but were not. Each block that a
    plan stores is in exactly one of these two, once. `changes`: blocks that were added to or removed from each medium.
    """

    stored: list[BlockHash] = field(default_factory=list)
    dropped: list[BlockHash] = field(default_factory=list)
    changes: list[Changes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.dropped or self.changes)


class StoresBlocks(ABC):
    """A worker side that reports events of blocks in a store."""

    @abstractmethod
    def watch_store(self) -> None:
        """Start to record events for `store_events`. Called once, after `register`."""

    @abstractmethod
    def store_events(self) -> StoreEvents:
        """Return the events of stored and dropped blocks since the last call."""


def keeps_blocks(spec: ConnectorSpec) -> bool:
    """True if the connector is a cache, with or without hand-offs."""
    return issubclass(spec.scheduler_class(), KeepsBlocks)


def lossy_codecs(spec: ConnectorSpec, config: KVTransferConfig) -> list[str] | None:
    """The names of the lossy codecs through which loaded KV may not be exact. None: the connector stores no KV."""
    side = spec.scheduler_class()
    return list(side.lossy_codecs(spec.completed(config))) if issubclass(side, KeepsBlocks) else None
