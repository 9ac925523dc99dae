"""Who may listen where."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.server.listen import listen, reserve, start_listening


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reserved_port_is_for_its_owner_alone(host: str) -> None:
    with closing(reserve(host, 0)) as reserved:
        port = reserved.getsockname()[1]
        for beside in (reserve, listen):
            with pytest.raises(ConfigError, match="in use"):
                beside(host, port)
        start_listening(reserved)
        for beside in (reserve, listen):
            with pytest.raises(ConfigError, match="in use"):
                beside(host, port)
    reserve(host, port).close()


def test_a_port_at_which_one_listens_is_reserved_by_nobody() -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            reserve("127.0.0.1", port)


def test_a_port_can_be_used_again_right_after_its_server_has_closed_connections() -> None:
    reserved = reserve("127.0.0.1", 0)
    port = reserved.getsockname()[1]
    start_listening(reserved)
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        reserved.setblocking(True)
        reserved.accept()[0].close()  # the end that closes first waits in TIME_WAIT
        assert client.recv(1) == b""
    reserved.close()
    reserve("127.0.0.1", port).close()
    listen("127.0.0.1", port).close()
