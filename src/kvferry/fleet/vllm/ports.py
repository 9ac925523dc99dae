"""Free ports for programs that need theirs as an argument."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from kvferry.core.errors import ConfigError

_FIRST, _LAST = 20_000, 32_000
"""Below the ephemeral ports that the system gives to outgoing connections, so that only another listener can take one
between now and its use."""

SPACING = 16
"""Distance between the ports: a data-parallel vLLM counts up from its side-channel port."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` ports on which nobody listens now. Raises `ConfigError` if there are not as many."""
    found = [port for _, port in zip(range(count), _free(host), strict=False)]
    if len(found) < count:
        raise ConfigError(f"no {count} free ports on {host} between {_FIRST} and {_LAST}")
    return found


def _free(host: str) -> Iterator[int]:
    candidates = list(range(_FIRST, _LAST, SPACING))
    random.shuffle(candidates)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in candidates:
        with socket.socket(family) as one:
            try:
                one.bind((host, port))
            except OSError:
                continue
        yield port
