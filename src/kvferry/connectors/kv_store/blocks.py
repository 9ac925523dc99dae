"""The blocks of a KV cache as bytes in host memory, where stores read and write.

Blocks of a KV cache in host memory are copied before they are stored, and loaded in place. Blocks of a KV cache on a
GPU are copied from and to pinned host memory by a kernel (`transport.cuda`).
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


class PendingCopy(ABC):
    """A copy of some blocks that is in progress. Used on the engine's thread."""

    def layer(self, layer: int) -> None:
        """Record that the KV of this layer has been written. From now on, it may be copied."""

    @abstractmethod
    def end(self) -> list[LayerViews]:
        """Finish the copy. Call it after all layers have been written. Returns the copy of each block, which the caller
        owns."""

    def drop(self) -> None:
        """Cancel the copy. When this has returned, nothing is copied any more."""


class StagingBuffer(ABC):
    """Memory for blocks that are being read from a store. `views`: for each block, the views of its layers."""

    views: list[LayerViews]

    @abstractmethod
    def commit(self) -> None:
        """Copy the blocks, which have arrived, to the KV cache, unless they were loaded in place."""


class BlockBytes(ABC):
    """The blocks of one rank's KV cache."""

    @abstractmethod
    def begin_copy(self, block_ids: Sequence[int]) -> PendingCopy:
        """Begin to copy blocks that are being written in this step. Raises `MemoryError`."""

    @abstractmethod
    def staging_buffer(
        self, layers: Sequence[int], block_ids: Sequence[int], *, in_place: bool = True
    ) -> StagingBuffer:
        """Memory for these layers of the blocks. `in_place`: this may be the KV cache itself, because the caller always
        waits for the store. Raises `MemoryError`."""

    def close(self) -> None:
        """Free the resources of copies. Call it while no copy is in progress."""


def block_bytes_of(memory: BlockMemory, saves_are_complete: bool) -> BlockBytes:
    """The blocks of this memory. `saves_are_complete`: as in `ConnectorContext`. Raises `ConfigError` for memory that
    cannot be copied."""
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

    def begin_copy(self, block_ids: Sequence[int]) -> PendingCopy:
        """Copies are made by `PendingCopy.end`."""
        return _HostPendingCopy(self._memory, block_ids)

    def staging_buffer(
        self, layers: Sequence[int], block_ids: Sequence[int], *, in_place: bool = True
    ) -> StagingBuffer:
        """The memory of the blocks themselves if `in_place`, else newly allocated memory."""
        return _HostStagingBuffer(self._memory, layers, block_ids, in_place)


class _HostPendingCopy(PendingCopy):
    def __init__(self, memory: BlockMemory, block_ids: Sequence[int]) -> None:
        self._memory, self._block_ids = memory, block_ids

    def end(self) -> list[LayerViews]:
        return [
            [memoryview(bytes(view)) for view in views]
            for views in _by_block(self._memory, range(self._memory.layout.num_layers), self._block_ids)
        ]


class _HostStagingBuffer(StagingBuffer):
    def __init__(self, memory: BlockMemory, layers: Sequence[int], block_ids: Sequence[int], in_place: bool) -> None:
        self._blocks = _by_block(memory, layers, block_ids)
        self.views = self._blocks
        if not in_place:
            self.views = [[memoryview(bytearray(len(view))) for view in views] for views in self._blocks]

    def commit(self) -> None:
        if self.views is not self._blocks:
            for views, contents in zip(self._blocks, self.views, strict=True):
                for view, content in zip(views, contents, strict=True):
                    copy_bytes(view, content)


def _by_block(memory: BlockMemory, layers: Sequence[int], block_ids: Sequence[int]) -> list[LayerViews]:
    return [list(views) for views in zip(*(memory.block_views(layer, block_ids) for layer in layers), strict=True)]


class DeviceBlocks(BlockBytes):
    """The blocks of a KV cache on a GPU. Saves and loads have one stream each, because two threads use them. `wait`:
    waits until the queued kernels of the model have run; None: not needed, because layers are announced only when they
    are written."""

    def __init__(
        self,
        memory: BlockMemory,
        wait: Callable[[], None] | None,
        make_copies: Callable[[str], CudaCopies] = lambda device: CudaCopies(CudaDriver(device), owns_driver=True),
        allocate: Callable[[int], memoryview] = pinned_memory,
    ) -> None:
        self._memory, self._wait, self._allocate = memory, wait, allocate
        self._saves, self._loads = make_copies(memory.device), make_copies(memory.device)

    def begin_copy(self, block_ids: Sequence[int]) -> PendingCopy:
        """Copies of a layer begin in `PendingCopy.layer`; `PendingCopy.end` waits for them."""
        return _DevicePendingCopy(self._memory, block_ids, self._saves, self._allocate, self._wait)

    def staging_buffer(
        self, layers: Sequence[int], block_ids: Sequence[int], *, in_place: bool = True
    ) -> StagingBuffer:
        """Pinned host memory, also with `in_place`."""
        return _DeviceStagingBuffer(self._memory, layers, block_ids, self._loads, self._allocate)

    def close(self) -> None:
        """Close both streams."""
        self._saves.close()
        self._loads.close()


class _PinnedBlocks:
    """Pinned memory for some layers of some blocks. Each block has its own memory, so that it can be freed
    separately."""

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
        """The pieces of these layers of all blocks, to be copied from the device to this memory."""
        lengths = [np.full(len(self._block_ids), self._sizes[layer], np.int64) for layer in layers]
        return Pieces(
            np.concatenate([self._memory.block_addresses(layer, self._block_ids) for layer in layers]),
            np.concatenate([self._addresses + self._offsets[layer] for layer in layers]),
            np.concatenate(lengths),
        )


class _DevicePendingCopy(PendingCopy):
    def __init__(
        self,
        memory: BlockMemory,
        block_ids: Sequence[int],
        copies: CudaCopies,
        allocate: Callable[[int], memoryview],
        wait: Callable[[], None] | None,
    ) -> None:
        self._unwritten = set(range(memory.layout.num_layers))
        self._pinned = _PinnedBlocks(memory, range(memory.layout.num_layers), block_ids, allocate)
        self._copies, self._wait = copies, wait

    def layer(self, layer: int) -> None:
        if self._wait is None:
            self._unwritten.discard(layer)
            self._copies.copy(self._pinned.pieces([layer]))

    def end(self) -> list[LayerViews]:
        if self._wait is not None:
            self._wait()
        if self._unwritten:
            self._copies.copy(self._pinned.pieces(sorted(self._unwritten)))
        self._copies.wait()
        return self._pinned.views

    def drop(self) -> None:
        self._copies.wait()


class _DeviceStagingBuffer(StagingBuffer):
    def __init__(
        self,
        memory: BlockMemory,
        layers: Sequence[int],
        block_ids: Sequence[int],
        copies: CudaCopies,
        allocate: Callable[[int], memoryview],
    ) -> None:
        self._layers, self._copies = layers, copies
        self._pinned = _PinnedBlocks(memory, layers, block_ids, allocate)
        self.views = self._pinned.views

    def commit(self) -> None:
        pieces = self._pinned.pieces(self._layers)
        self._copies.copy(Pieces(pieces.local, pieces.remote, pieces.lengths))
        self._copies.wait()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
