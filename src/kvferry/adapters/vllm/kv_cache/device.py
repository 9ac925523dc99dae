"""Marks in a device's work, which show when the KV of a layer is written.

On the CPU, a layer is computed when its call returns. On a GPU, vLLM only queues the work in a stream; a mark in the
stream is reached when everything queued before it is done. Marks on devices have been run with CUDA only.
"""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMark(Protocol):
    """A point in the order of the device's work."""

    def wait(self) -> None:
        """Wait until all work that was queued before the mark is done. The thread sleeps while it waits."""


class Device(Protocol):
    """Marks the work that is queued on a device so far."""

    is_asynchronous: bool
    """True if work is only queued when a call returns."""

    def mark(self) -> DeviceMark:
        """A mark at the end of the stream in which this thread queues work."""


class _ReachedMark:
    def wait(self) -> None:
        """Returns at once: nothing was queued."""


class CpuDevice:
    """The CPU: work is done when its call returns."""

    is_asynchronous = False

    def mark(self) -> DeviceMark:
        """A mark that has been reached already."""
        return _ReachedMark()


class Accelerator:
    """CUDA, ROCm, XPU: marks are PyTorch's events. Has been run with CUDA only."""

    is_asynchronous = True

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def mark(self) -> DeviceMark:
        """An event in the current stream. If vLLM divides a step into micro-batches, each has its own stream."""
        event = torch.Event(self._device, blocking=True)
        event.record(torch.accelerator.current_stream(self._device))
        return _EventMark(event)


class _EventMark:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Sleeps in the driver, since the event was made to block."""
        self._event.synchronize()


def device_of(name: str) -> Device:
    """The device with this name, such as "cpu" or "cuda:1" (`str(tensor.device)`)."""
    return CpuDevice() if name == "cpu" else Accelerator(name)
