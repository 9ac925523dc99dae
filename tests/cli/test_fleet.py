"""What `kvferry fleet` says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry.cli.common import http_settings
from kvferry.cli.main import main
from kvferry.fleet.spec import Listen
from kvferry.http.server.config import HttpAccess, HttpConfig
from kvferry.http.server.limits import HttpLimits
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


async def test_who_started_a_router_without_a_key_is_its_operator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a restart, and nobody else is."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "ours"))
    http = HttpConfig(**http_settings(Listen(grace_s=1), HttpAccess(), HttpLimits()))
    async with routing([], [], http, registration=True) as (router, url):
        for command in (["add", "decode", "http://127.0.0.1:9"], ["drain", "decode-0"], ["list"]):
            assert await asyncio.to_thread(main, ["fleet", *command, "--router", url]) == 0
        assert "http://127.0.0.1:9" in capsys.readouterr().out.splitlines()[-1]
        monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "theirs"))
        assert await asyncio.to_thread(main, ["fleet", "add", "decode", "http://127.0.0.1:8", "--router", url]) == 2
        assert "the user who started the router is its operator" in capsys.readouterr().err
        assert len(list(router.services.pools)) == 1


@pytest.mark.parametrize("command", [["router", "--registration"], ["serve", "m", "--prefill", "1", "--registration"]])
@pytest.mark.parametrize(
    ("token", "complaint"), [("", "--registration needs KVFERRY_AUTH_TOKEN"), ("x", "it needs 16")]
)
def test_no_registration_without_a_token(
    command: list[str], token: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", token)
    assert main(command) == 2
    assert complaint in capsys.readouterr().err


def test_a_router_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "list", "--router", "http://127.0.0.1:9"]) == 2
    assert "the router at http://127.0.0.1:9 (--router) did not answer" in capsys.readouterr().err
