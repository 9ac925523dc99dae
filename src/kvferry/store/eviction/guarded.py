"""A wrapper around an eviction policy that handles the policy's errors.

Policies may come from other packages, and stores and the engine's prefix cache report every use of a block to them. If
one raises, or evicts a block that is not cached or is pinned, this is logged once, and LRU replaces it, beginning with
all cached blocks in the order of their last use. For that, this class keeps its own record of the cached blocks and
their pins.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvferry.store.eviction.base import BlockKey, EvictionPolicy
from kvferry.store.eviction.lru import Lru

logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Has the methods of `EvictionPolicy`. They do not raise the policy's exceptions."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        """The policy that currently decides."""
        self._pins: OrderedDict[BlockKey, int] = OrderedDict()
        """Number of pins of every cached block, the least recently used block first."""
        self._num_pinned = 0

    def insert(self, key: BlockKey, now: float, parent: BlockKey | None = None) -> None:
        """Add a block."""
        self._pins.setdefault(key, 0)
        self._pins.move_to_end(key)
        self._report_to_policy(self.policy.insert, key, now, parent)

    def access(self, key: BlockKey, now: float) -> None:
        """Record a use of a block; ignored if it is not cached."""
        if key in self._pins:
            self._pins.move_to_end(key)
            self._report_to_policy(self.policy.access, key, now)

    def finish(self, keys: Iterable[BlockKey], num_output_tokens: int, now: float) -> None:
        """The request whose prompt consists of `keys` has got its whole answer."""
        self._report_to_policy(self.policy.finish, keys, num_output_tokens, now)

    def remove(self, key: BlockKey) -> None:
        """Remove a block for another reason than eviction; ignored if it is not cached."""
        if key in self._pins:
            self._num_pinned -= self._pins.pop(key) > 0
            self._report_to_policy(self.policy.remove, key)

    def pin(self, key: BlockKey) -> None:
        """Protect a block from eviction until `unpin` was called as often as `pin`; ignored if it is not cached."""
        if key in self._pins:
            self._num_pinned += self._pins[key] == 0
            self._pins[key] += 1
            self._report_to_policy(self.policy.pin, key)

    def unpin(self, key: BlockKey, now: float) -> None:
        """Undo one `pin`; ignored if the block is not pinned."""
        if self._pins.get(key):
            self._pins[key] -= 1
            self._num_pinned -= self._pins[key] == 0
            self._report_to_policy(self.policy.unpin, key, now)

    def evict(self, now: float) -> BlockKey | None:
        """Choose a block to evict, and remove it. None if all blocks are pinned, or there are none."""
        if self._num_pinned == len(self._pins):
            return None
        try:
            victim = self.policy.evict(now)
            if self._pins.get(victim, 1):
                raise LookupError(f"it evicts {victim!r}, which is pinned or not cached")
        except Exception as error:  # noqa: BLE001 - the policy's mistake
            self._replace(error)
            victim = self.policy.evict(now)
        del self._pins[victim]
        return victim

    def __contains__(self, key: BlockKey) -> bool:
        """True if the block is cached."""
        return key in self._pins

    def __iter__(self) -> Iterator[BlockKey]:
        """The cached blocks, the least recently used first."""
        return iter(self._pins)

    def __len__(self) -> int:
        """Number of cached blocks."""
        return len(self._pins)

    def _report_to_policy(self, call: Callable[..., None], *args: object) -> None:
        """Report an event to the policy, after it was recorded here."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - the policy's mistake
            self._replace(error)

    def _replace(self, error: Exception) -> None:
        logger.error("eviction policy %s failed; LRU takes its place", type(self.policy).__qualname__, exc_info=error)
        self.policy = Lru(max(1, len(self._pins)))
        for key, num_pins in self._pins.items():
            self.policy.insert(key, 0.0)
            for _ in range(num_pins):
                self.policy.pin(key)
