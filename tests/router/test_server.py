"""The router as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

SERVE = """
import json, sys
from kvferry.http.server.config import HttpConfig
from kvferry.router.config import RouterConfig
from kvferry.router.server import run_router

def tell(about):
    print(json.dumps(about), flush=True)

sys.exit(run_router(RouterConfig(decode_url=("http://127.0.0.1:9",)), HttpConfig(port=0), on_ready=tell))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_ends_well(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(url + "/kvferry/instances", timeout=10) as response:
            assert json.load(response)["instances"][0]["name"] == "decode-0"
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
