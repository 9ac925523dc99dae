"""Who may listen where."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.listen import hold, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_held_is_for_those_alone_who_share_it(host: str) -> None:
    with closing(hold(host, 0)) as held:
        port = held.getsockname()[1]
        for beside in (hold, listen):
            with pytest.raises(ConfigError, match="in use"):
                beside(host, port)
        with closing(listen(host, port, reuse_port=True)), closing(listen(host, port, reuse_port=True)):
            for beside in (hold, listen):
                with pytest.raises(ConfigError, match="in use"):
                    beside(host, port)
        listen(host, port, reuse_port=True).close()  # one that is started again
    hold(host, port).close()


def test_a_port_at_which_one_listens_is_held_by_nobody() -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            hold("127.0.0.1", port)
