"""Where the model runs, as far as it matters when a layer's KV is written.

On the host a layer is computed when its call returns. On a device vLLM only queues the work, in a stream: a mark in the
stream says when all that was queued before it is done. Marks on devices have never been run.
"""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMark(Protocol):
    """A place in the order of the device's work."""

    def wait(self) -> None:
        """Return when all work queued before the mark is done. The thread sleeps meanwhile."""


class Device(Protocol):
    """Makes marks."""

    runs_behind: bool
    """Whether work is only queued when a call returns."""

    def mark(self) -> DeviceMark:
        """Now, in the stream that this thread queues work in."""


class _Done:
    def wait(self) -> None:
        """Nothing was queued."""


class Host:
    """Work is done when its call returns."""

    runs_behind = False

    def mark(self) -> DeviceMark:
        """Always reached."""
        return _Done()


class Accelerator:
    """CUDA, ROCm, XPU: marks are events of PyTorch's. Never run."""

    runs_behind = True

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def mark(self) -> DeviceMark:
        """An event in the current stream, which is that of the micro-batch where vLLM runs several."""
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
    """`name`: of a tensor's device, "cpu" or "cuda:1"."""
    return Host() if name == "cpu" else Accelerator(name)
