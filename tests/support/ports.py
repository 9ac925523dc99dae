"""Ports for servers that cannot be given port 0, or that are started again at the same address.

They are not of those that the kernel gives to whoever asks for any: such a port could be another's before the server of
the test has it. Each worker of pytest has a share of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator

_SHARES = 8
_FIRST, _LAST = 12_000, 20_000
"""Below the ephemeral ports, which begin at 32,768, and below `kvferry.fleet.processes.vllm.ports`."""


def _candidates() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    size = (_LAST - _FIRST) // _SHARES
    begin = _FIRST + worker % _SHARES * size
    at = random.randrange(size)  # another run of the tests may be using the same share
    return (begin + (at + number) % size for number in itertools.count())


_next = _candidates()


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens on, and that nobody else is given."""
    for port in _next:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable")
