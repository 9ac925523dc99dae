"""What `kvferry fleet` says."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.cli.main import main
from kvferry.http.config import HttpConfig
from router.peers import SECRET, routing

HTTP = HttpConfig(shutdown_grace_s=1, secret=SECRET)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_AUTH_TOKEN", raising=False)


async def test_without_instances_and_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    async with routing([], [], HTTP, registration=True) as (_, url):
        assert await asyncio.to_thread(main, ["fleet", "list", "--router", url]) == 0
        assert capsys.readouterr() == ("", "kvferry: the router has no instances\n")
        assert await asyncio.to_thread(main, ["fleet", "drain", "decode-0", "--router", url]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "needs an operator: set KVFERRY_AUTH_TOKEN to that of the router, or give --admin-key" in line


def test_a_router_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "list", "--router", "http://127.0.0.1:9"]) == 2
    assert "the router at http://127.0.0.1:9 (--router) did not answer" in capsys.readouterr().err
