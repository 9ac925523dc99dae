"""Free ports for programs that need theirs as an argument."""

from __future__ import annotations

import itertools
import random
import re
import socket
from collections.abc import Sequence

from kvferry.core.errors import ConfigError

_EVENTS = "--kv-events-config"
_ANY_PORT = re.compile(r'(endpoint"\s*:\s*"tcp://[^"]*:)\*(?=")')

_FIRST, _LAST = 20_000, 32_000
"""Below the ephemeral ports that the system gives to outgoing connections, so that only another listener can take one
between now and its use."""

SPACING = 16
"""Distance between the ports: a data-parallel vLLM counts up from its side-channel port."""


_CANDIDATES = random.sample(range(_FIRST, _LAST, SPACING), len(range(_FIRST, _LAST, SPACING)))
_in_turn = itertools.cycle(_CANDIDATES)
"""A port that was returned is returned again only after all others, because its program may not listen on it yet."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` unused ports that this process has not returned recently. Raises `ConfigError` if there are not as
    many."""
    free = (port for port in itertools.islice(_in_turn, len(_CANDIDATES)) if _is_free(host, port))
    ports = list(itertools.islice(free, count))
    if len(ports) < count:
        raise ConfigError(f"no {count} free ports on {host} between {_FIRST} and {_LAST}")
    return ports


def with_event_ports(flags: Sequence[str], host: str) -> list[str]:
    """The flags with a free port for each `*` in the endpoints of `--kv-events-config`, which vLLM and SGLang have:
    servers of one machine cannot share one."""
    filled, is_value = list[str](), False
    for flag in flags:
        if is_value or flag.startswith(f"{_EVENTS}="):
            flag = _ANY_PORT.sub(lambda match: f"{match[1]}{free_ports(1, host)[0]}", flag)
        is_value = flag == _EVENTS
        filled.append(flag)
    return filled


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True
