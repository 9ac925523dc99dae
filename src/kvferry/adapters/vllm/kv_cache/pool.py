"""Puts vLLM's KV cache into shared memory, so that an instance on the same machine reads it with a single copy.

vLLM gets from its connector a context in which to allocate the KV cache. Within kvferry's context, a `SharedSegment`
provides the memory of the one large `torch.zeros` of that allocation. vLLM itself is not changed.

Owns the segments of this process. They exist as long as a tensor uses them, even after their connectors have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvferry.core.errors import ConfigError
from kvferry.transport.shared_memory import SharedSegment

logger = logging.getLogger(__name__)

_segments: dict[int, PooledSegment] = {}
"""The segments of this process by their address. Several connectors of one vLLM share a segment."""


class PooledSegment:
    """A segment with vLLM's KV cache in it, and the number of connectors that use it."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment, self._num_users = segment, 0
        self.name = segment.name

    def retain(self) -> PooledSegment:
        """Add a user."""
        self._num_users += 1
        return self

    def release(self) -> None:
        """Remove a user. When the last user is removed, other processes can no longer attach."""
        self._num_users -= 1
        if self._num_users <= 0:
            _segments.pop(self._segment.address, None)
            self._segment.close()


def find_segment(address: int) -> PooledSegment | None:
    """The segment that begins at `address`, with one more user; None: there is none."""
    segment = _segments.get(address)
    return segment.retain() if segment is not None else None


class SharedAllocation(TorchFunctionMode):
    """Serves one `torch.zeros` of exactly `num_bytes` in host memory from shared memory.

    PyTorch has memory pools for devices only, so on the host vLLM's hook for an allocation context is implemented by a
    `TorchFunctionMode`. If vLLM allocates in another way, this is logged, and KV is read over TCP.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self._was_used = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not self._was_used and error[0] is None:
            logger.warning(
                "this vLLM does not allocate its KV cache as one torch.zeros of %d bytes, so it is not in shared"
                " memory, and transfers on this machine go over TCP",
                self._num_bytes,
            )

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """All other functions are called unchanged."""
        kwargs = kwargs or {}
        if func is torch.zeros and self._is_kv_cache(args, kwargs):
            self._was_used = True
            try:
                return self._serve()
            except ConfigError as error:
                logger.warning("the KV cache is not in shared memory, so its transfers take two copies: %s", error)
        return func(*args, **kwargs)

    def _is_kv_cache(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return on_host and tuple(args) == (self._num_bytes,) and kwargs.get("dtype") is torch.int8

    def _serve(self) -> torch.Tensor:
        segment = SharedSegment.create(self._num_bytes, populated=True)  # like the mode that it replaces
        _segments[segment.address] = PooledSegment(segment)
        return torch.frombuffer(segment.buffer, dtype=torch.int8)
