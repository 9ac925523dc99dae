"""The router as a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from kvferry.core.errors import ConfigError
from kvferry.router.server import listen

SERVE = """
import json, sys
from kvferry.router.config import RouterConfig
from kvferry.router.server import run_router

def tell(about):
    print(json.dumps(about), flush=True)

sys.exit(run_router(RouterConfig(decode_url=("http://127.0.0.1:9",)), host="127.0.0.1", port=0, on_ready=tell))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_ends_well(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(url + "/kvferry/instances", timeout=10) as response:
            assert json.load(response)["instances"][0]["url"] == "http://127.0.0.1:9"
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


def test_an_address_in_use_is_the_users_to_change() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*--port"):
            listen("127.0.0.1", port)


def test_connections_do_not_wait_for_acknowledgements() -> None:
    """asyncio sets TCP_NODELAY where a socket says that it is TCP; an accepted one says what its listener does."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
