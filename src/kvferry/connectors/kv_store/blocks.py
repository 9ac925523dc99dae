"""The blocks of a KV cache as bytes in host memory, which is where stores read and write.

A KV cache in host memory is copied from, and written to in place. One on a GPU is copied from and to pinned host memory
by a kernel (`transport.cuda`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from kvferry.core.errors import ConfigError
from kvferry.store.copying import copy_bytes
from kvferry.store.record import LayerViews
from kvferry.transport.cuda.copies import CudaCopies, device_wait, pinned_memory
from kvferry.transport.cuda.driver import CudaDriver
from kvferry.transport.memory import BlockMemory, Pieces


class Copying(ABC):
    """Copies of some blocks. Used on the engine's thread."""

    def layer(self, layer: int) -> None:
        """Note that the KV of this layer has been written: it may be copied from now on."""

    @abstractmethod
    def end(self) -> list[LayerViews]:
        """End, as all layers have been written. Returns the copies of each block, which are the caller's."""

    def drop(self) -> None:
        """Give up the copies, which are not wanted; nothing is copied any more when this returns."""


class Landing(ABC):
    """Where blocks that are being read from a store arrive. `views`: for each block, the views of its layers."""

    views: list[LayerViews]

    @abstractmethod
    def settle(self) -> None:
        """Have the blocks, which have arrived, in the KV cache when this returns."""


class BlockBytes(ABC):
    """The blocks of one rank's KV cache."""

    @abstractmethod
    def copying(self, block_ids: Sequence[int]) -> Copying:
        """Begin to copy blocks that are being written in this step. Raises `MemoryError`."""

    @abstractmethod
    def landing(self, layers: Sequence[int], block_ids: Sequence[int], *, in_place: bool = True) -> Landing:
        """Room for these layers of the blocks. `in_place`: their own memory will do, since the caller waits for the
        store whatever happens. Raises `MemoryError`."""

    def close(self) -> None:
        """Free what copies needed, when none is under way."""


def block_bytes_of(memory: BlockMemory, saves_are_complete: bool) -> BlockBytes:
    """`saves_are_complete`: see `ConnectorContext`. Raises `ConfigError` for memory that cannot be copied."""
    if memory.device == "cpu":
        return HostBlocks(memory)
    if memory.device.partition(":")[0] != "cuda":
        raise ConfigError(
            f"stores keep KV of host memory and of CUDA devices, and this engine's is on {memory.device}; run it with"
            " --device cpu"
        )
    return DeviceBlocks(memory, None if saves_are_complete else device_wait(memory.device))


class HostBlocks(BlockBytes):
    """The blocks of a KV cache in host memory."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory

    def copying(self, block_ids: Sequence[int]) -> Copying:
        """Copies are made by `Copying.end`."""
        return _HostCopying(self._memory, block_ids)

    def landing(self, layers: Sequence[int], block_ids: Sequence[int], *, in_place: bool = True) -> Landing:
        """Where these blocks arrive; in place: the blocks themselves."""
        return _HostLanding(self._memory, layers, block_ids, in_place)


class _HostCopying(Copying):
    def __init__(self, memory: BlockMemory, block_ids: Sequence[int]) -> None:
        self._memory, self._block_ids = memory, block_ids

    def end(self) -> list[LayerViews]:
        return [
            [memoryview(bytes(view)) for view in views]
            for views in _by_block(self._memory, range(self._memory.layout.num_layers), self._block_ids)
        ]


class _HostLanding(Landing):
    def __init__(self, memory: BlockMemory, layers: Sequence[int], block_ids: Sequence[int], in_place: bool) -> None:
        self._blocks = _by_block(memory, layers, block_ids)
        self.views = self._blocks
        if not in_place:
            self.views = [[memoryview(bytearray(len(view))) for view in views] for views in self._blocks]

    def settle(self) -> None:
        if self.views is not self._blocks:
            for views, contents in zip(self._blocks, self.views, strict=True):
                for view, content in zip(views, contents, strict=True):
                    copy_bytes(view, content)


def _by_block(memory: BlockMemory, layers: Sequence[int], block_ids: Sequence[int]) -> list[LayerViews]:
    return [list(views) for views in zip(*(memory.block_views(layer, block_ids) for layer in layers), strict=True)]


class DeviceBlocks(BlockBytes):
    """The blocks of a KV cache on a GPU. Saves and loads have a stream each, as two threads use them. `wait`: waits
    until the model, as far as it is queued, has run; None if layers are only announced when they are written."""

    def __init__(
        self,
        memory: BlockMemory,
        wait: Callable[[], None] | None,
        make_copies: Callable[[str], CudaCopies] = lambda device: CudaCopies(CudaDriver(device), owns_driver=True),
        allocate: Callable[[int], memoryview] = pinned_memory,
    ) -> None:
        self._memory, self._wait, self._allocate = memory, wait, allocate
        self._saves, self._loads = make_copies(memory.device), make_copies(memory.device)

    def copying(self, block_ids: Sequence[int]) -> Copying:
        """Copies of a layer begin with `Copying.layer`, and are waited for in `Copying.end`."""
        return _DeviceCopying(self._memory, block_ids, self._saves, self._allocate, self._wait)

    def landing(self, layers: Sequence[int], block_ids: Sequence[int], *, in_place: bool = True) -> Landing:
        """Where these blocks arrive: in pinned host memory, in place or not."""
        return _DeviceLanding(self._memory, layers, block_ids, self._loads, self._allocate)

    def close(self) -> None:
        """Close both streams."""
        self._saves.close()
        self._loads.close()


class _Pinned:
    """Room for some layers of some blocks: a piece of host memory for each block, so that each is freed by itself."""

    def __init__(
        self,
        memory: BlockMemory,
        layers: Sequence[int],
        block_ids: Sequence[int],
        allocate: Callable[[int], memoryview],
    ) -> None:
        self._memory, self._block_ids = memory, block_ids
        self._sizes = {layer: memory.geometry.span_sizes[layer] for layer in layers}
        *offsets, num_bytes = accumulate(self._sizes.values(), initial=0)
        self._offsets = dict(zip(layers, offsets, strict=True))
        blocks = [allocate(num_bytes) for _ in block_ids]
        self._addresses = np.array([_address(block) for block in blocks], np.int64)
        self.views: list[LayerViews] = [
            [block[self._offsets[layer] : self._offsets[layer] + size] for layer, size in self._sizes.items()]
            for block in blocks
        ]

    def pieces(self, layers: Sequence[int]) -> Pieces:
        """These layers of all blocks, to be copied from the device to here."""
        lengths = [np.full(len(self._block_ids), self._sizes[layer], np.int64) for layer in layers]
        return Pieces(
            np.concatenate([self._memory.block_addresses(layer, self._block_ids) for layer in layers]),
            np.concatenate([self._addresses + self._offsets[layer] for layer in layers]),
            np.concatenate(lengths),
        )


class _DeviceCopying(Copying):
    def __init__(
        self,
        memory: BlockMemory,
        block_ids: Sequence[int],
        copies: CudaCopies,
        allocate: Callable[[int], memoryview],
        wait: Callable[[], None] | None,
    ) -> None:
        self._left = set(range(memory.layout.num_layers))
        self._pinned = _Pinned(memory, range(memory.layout.num_layers), block_ids, allocate)
        self._copies, self._wait = copies, wait

    def layer(self, layer: int) -> None:
        if self._wait is None:
            self._left.discard(layer)
            self._copies.copy(self._pinned.pieces([layer]))

    def end(self) -> list[LayerViews]:
        if self._wait is not None:
            self._wait()
        if self._left:
            self._copies.copy(self._pinned.pieces(sorted(self._left)))
        self._copies.wait()
        return self._pinned.views

    def drop(self) -> None:
        self._copies.wait()


class _DeviceLanding(Landing):
    def __init__(
        self,
        memory: BlockMemory,
        layers: Sequence[int],
        block_ids: Sequence[int],
        copies: CudaCopies,
        allocate: Callable[[int], memoryview],
    ) -> None:
        self._layers, self._copies = layers, copies
        self._pinned = _Pinned(memory, layers, block_ids, allocate)
        self.views = self._pinned.views

    def settle(self) -> None:
        pieces = self._pinned.pieces(self._layers)
        self._copies.copy(Pieces(pieces.local, pieces.remote, pieces.lengths))
        self._copies.wait()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
