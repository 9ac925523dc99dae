"""Who may listen where."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.server.listen import listen, reserve


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reserved_port_is_for_its_owner_alone(host: str) -> None:
    with closing(reserve(host, 0)) as reserved:
        port = reserved.getsockname()[1]
        for beside in (reserve, listen):
            with pytest.raises(ConfigError, match="in use"):
                beside(host, port)
        reserved.listen()
        for beside in (reserve, listen):
            with pytest.raises(ConfigError, match="in use"):
                beside(host, port)
    reserve(host, port).close()


def test_a_port_at_which_one_listens_is_reserved_by_nobody() -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            reserve("127.0.0.1", port)
