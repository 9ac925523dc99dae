"""Keys: each for one purpose, each signature for one server, one request, half a minute and once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import AuthenticationFailed, ConfigError
from kvferry.core.keys import (
    AUTH_TOKEN,
    LocalReplayGuard,
    Signer,
    Verifier,
    derive,
    http_secret,
    shared_token,
    users_token,
)

SECRET = "the token of tests"
ALL = ("kv", "tickets", "markers", "proof", "probe", "release", "operate", "register")


def met(verifier: Verifier, clock: ManualClock, secret: str = SECRET) -> Signer:
    return Signer(secret, "n", msgspec.json.encode(verifier.answer("n")), clock)


def test_no_key_is_another_and_none_is_the_secret() -> None:
    keys = {derive(secret, purpose) for secret in (SECRET, "another token") for purpose in ALL}
    assert len(keys) == 2 * len(ALL)
    assert not any(SECRET.encode() in key for key in keys)
    assert derive("", "kv") == b""


@pytest.mark.parametrize("ahead_s", [-1e6, 0.0, 1e6])
def test_a_request_is_known_whatever_the_clocks_say(ahead_s: float) -> None:
    ours, theirs = ManualClock(5e6), ManualClock(5e6 + ahead_s)
    verifier = Verifier(SECRET, "a", theirs)
    signer = met(verifier, ours)
    for clock in (ours, theirs):
        clock.advance(1e5)  # a session holds for as long as the server runs
    assert verifier.check(signer.sign("probe", "GET", "/metrics"), "GET", "/metrics")[0] == "probe"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("method", "not signed with"),
        ("target", "not signed with"),
        ("purpose", "not signed with"),
        ("secret", "not signed with"),
        ("server", "another server"),
        ("restart", "restart"),
        ("late", "ago"),
        ("twice", "used before"),
    ],
)
def test_it_is_good_for_nothing_else(what: str, reason: str) -> None:
    clock = ManualClock(100.0)
    verifier = Verifier(SECRET, "a", clock)
    header = met(verifier, clock).sign("operate", "POST", "/x", b"body")
    method, target = "POST", "/x"
    match what:
        case "method":
            method = "PUT"
        case "target":
            target = "/x?y"
        case "purpose":
            header = header.replace("operate", "probe")
        case "secret":
            verifier = Verifier("another token", "a", clock)
        case "server":
            verifier = Verifier(SECRET, "b", clock)
        case "restart":
            clock.advance(1)
            verifier = Verifier(SECRET, "a", clock)
        case "late":
            clock.advance(Verifier.lifetime_s + 1)
        case "twice":
            verifier.check(header, method, target)
            clock.advance(Verifier.lifetime_s - 1)
    with pytest.raises(AuthenticationFailed, match=reason):
        verifier.check(header, method, target)


def test_used_ones_are_remembered_for_as_long_as_they_hold_and_no_longer() -> None:
    clock = ManualClock(100.0)
    used = LocalReplayGuard()
    verifier = Verifier(SECRET, "a", clock, used)
    signer = met(verifier, clock)
    for _ in range(1000):
        verifier.check(signer.sign("release", "POST", "/x"), "POST", "/x")
        clock.advance(Verifier.lifetime_s / 100)
    assert len(used._used) < 110


@pytest.mark.parametrize(
    "header", ["", "Kvferry ", "Kvferry a.b.c.d.e.f", "Kvferry probe.a.x.b.c.d", "Kvferry " + "." * 6]
)
def test_what_is_no_signature(header: str) -> None:
    with pytest.raises(AuthenticationFailed):
        Verifier(SECRET, "a").check(header, "GET", "/")


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b"\xff", b'{"server":"a","now_ns":1,"proof":"x"}'])
def test_a_server_that_proves_nothing_is_told_nothing(answer: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        Signer(SECRET, "n", answer)


def test_a_proof_is_for_the_nonce_that_was_sent() -> None:
    clock = ManualClock(100.0)
    overheard = msgspec.json.encode(Verifier(SECRET, "a", clock).answer("n"))
    for secret, nonce in ((SECRET, "m"), ("another token", "n")):
        with pytest.raises(AuthenticationFailed):
            Signer(secret, nonce, overheard, clock)


def test_which_secret_a_process_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(AUTH_TOKEN, raising=False)
    assert shared_token() == ""
    assert http_secret(["short", "an admin key that is long"]) == "an admin key that is long"
    assert http_secret(["short"]) == users_token() != ""
    monkeypatch.setenv(AUTH_TOKEN, SECRET)
    assert http_secret(["an admin key that is long"]) == shared_token() == SECRET
    for short in ("x", "fifteen chars.."):
        monkeypatch.setenv(AUTH_TOKEN, short)
        with pytest.raises(ConfigError, match="needs 16"):
            shared_token()


def test_this_users_token_is_one_file_that_only_he_can_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    code = "from kvferry.core.keys import users_token; print(users_token())"
    environment = {**os.environ, "KVFERRY_CACHE_DIR": str(folder)}
    asked = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in "abcd"
    ]
    (found,) = {one.communicate()[0].strip() for one in asked}
    assert len(found) == 64
    path = folder / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [*folder.iterdir()] == [path]
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert users_token() == found
    path.chmod(0o644)
    assert users_token() != found  # somebody may have read it
