"""What `kvferry fleet` says."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvferry.cli.fleet import controllers
from kvferry.cli.main import main
from kvferry.fleet.control.facts import RoleStatus
from kvferry.fleet.control.ledger import FleetStatus, Ledger
from kvferry.fleet.processes.process import PROGRAM
from kvferry.fleet.processes.running import http_settings
from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_spec import read_fleet
from kvferry.fleet.spec.settings import ListenSettings
from kvferry.http.server.config import HttpAccess, HttpConfig
from kvferry.http.server.limits import HttpLimits
from kvferry.models import catalog
from router.peers import SECRET, routing
from support.waiting import until

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
        assert "needs an operator: set KVFERRY_AUTH_TOKEN to the router's, or give --admin-key" in line


async def test_who_started_a_router_without_a_key_is_its_operator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a restart, and nobody else is."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "ours"))
    http = HttpConfig(**http_settings(ListenSettings(grace_s=1), HttpAccess(), HttpLimits()))
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
    assert main(["fleet", "list", "--router", "http://127.0.0.1:9"]) == 1
    assert "the router at http://127.0.0.1:9 did not answer" in capsys.readouterr().err


SPEC = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[role.both]
[router]
count = 0
port = 0
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "a token of tests that is long enough")
    (tmp_path / "chat.toml").write_text(SPEC)
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("pooling", "poling", "mode: 'poling' is not a known value; did you mean 'pooling'?"),
        ("kvferry/tiny-python", "/nowhere/at/all", "there is no directory '/nowhere/at/all'"),
        ("kvferry/tiny-python", "kvferry/tiny-pyton", "did you mean 'kvferry/tiny-python'?"),
        ("[role.both]", "[role.boht]", "role.boht is not a known key; did you mean 'both'?"),
        ("[role.both]", "[role.both]\ncount = 99999", "role.both.count: must be 0 to 4096, got 99999"),
        ('"chat"', '"chat\\n"', "name: must be lower-case letters, digits and hyphens"),
        ("count = 0", "count = " + "[" * 5000, "is not valid TOML: its lists or tables are nested too deeply"),
    ],
)
def test_a_wrong_spec_is_one_line_and_makes_nothing(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
) -> None:
    (tmp_path / "chat.toml").write_text(SPEC.replace(before, after))
    assert main(["fleet", "apply", str(tmp_path / "chat.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not state.exists()


@pytest.mark.parametrize("name", ["chat", "", ".", "..", "../x", "/etc", "a" * 5000, "a\0b"])
def test_a_fleet_that_is_not_there(state: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for command in (["status"], ["delete"], ["roll"], ["rollback"], ["pause"], ["resume"], ["control"]):
        assert main(["fleet", *command, name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "nor any other; `kvferry fleet apply SPEC` makes one" in line
    assert not state.exists()


def test_what_is_kept_of_a_fleet_cannot_be_read(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(state / "fleets" / "chat")
    ledger.apply(read_fleet(state.parent / "chat.toml"))
    (ledger.folder / "status.json").write_bytes(b"\xff{")
    (ledger.folder / "history.jsonl").write_text('nonsense\n{"at": 1e300, "what": "up"}\n')
    assert main(["fleet", "status", "chat"]) == 1
    assert "no controller looks after it" in capsys.readouterr().out
    assert main(["fleet", "status", "chat", "--history"]) == 0
    assert capsys.readouterr().out == "1e+300 up\n"
    (ledger.folder / "wanted.json").write_text("{")
    for command in (["status", "chat"], ["scale", "chat", "both=2"], ["delete", "chat"]):
        assert main(["fleet", *command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "apply the fleet's spec again" in line


def test_why_the_last_controller_ended_is_said(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(state / "fleets" / "chat")
    ledger.apply(read_fleet(state.parent / "chat.toml"))
    (ledger.folder / "controller.log").write_text("kvferry: error: cannot listen on 127.0.0.1:1: Permission denied\n")
    assert main(["fleet", "status", "chat"]) == 1
    assert "no controller looks after it (cannot listen on 127.0.0.1:1: Permission denied);" in capsys.readouterr().out


def test_what_keeps_a_fleet_from_what_it_is_to_be_is_said_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(state / "fleets" / "chat")
    ledger.apply(read_fleet(state.parent / "chat.toml"))
    failed = RoleStatus(desired=1, ready=0, updated=0, starting=0, draining=0, failed="failed once", given_up=True)
    trouble = ("the control service does not answer", "decode: failed once")
    ledger.write_status(
        FleetStatus(at=1.0, pid=2, number=1, url="", roles={"decode": failed}, members=(), trouble=trouble)
    )
    assert main(["fleet", "status", "chat"]) == 1
    shown = capsys.readouterr().out
    assert "\n  the control service does not answer\n" in shown
    assert shown.count("failed once") == 1


def test_what_was_seen_last_is_not_shown_as_what_is_there_now(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a power cut, all processes are gone, and the files say that they are ready."""
    ledger, pid = Ledger(state / "fleets" / "chat"), os.getpid()
    ledger.apply(read_fleet(state.parent / "chat.toml"))
    both = RoleStatus(desired=1, ready=1, updated=1, starting=0, draining=0)
    seen = FleetStatus(1.0, pid, 1, "http://127.0.0.1:9", {"both": both}, (), settled=True, started=started_at(pid))
    lease = ledger.try_acquire()
    assert lease is not None
    ledger.write_status(seen)
    assert main(["fleet", "status", "chat"]) == 0
    assert "as of" not in capsys.readouterr().out
    assert main(["fleet", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_current"] is True
    ledger.write_status(replace(seen, started=seen.started + 1))  # the next controller has seen nothing yet
    assert main(["fleet", "status", "chat"]) == 1
    lease.close()
    ledger.write_status(seen)
    assert main(["fleet", "status", "chat"]) == 1
    shown = capsys.readouterr().out
    assert "no controller looks after it" in shown
    assert f"as of {datetime.fromtimestamp(1):%Y-%m-%d %H:%M:%S}, when it changed last; whether it is still so" in shown
    assert main(["fleet", "status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["is_current"] is False


async def test_a_change_is_waited_for_while_what_runs_the_members_does_not_answer(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(state / "fleets" / "chat")
    number = ledger.apply(read_fleet(state.parent / "chat.toml")).number + 1
    lease = ledger.try_acquire()
    assert lease is not None
    pid = os.getpid()
    seen = FleetStatus(1.0, pid, number, "http://127.0.0.1:9", roles={}, members=(), started=started_at(pid))
    ledger.write_status(replace(seen, trouble=("the control service does not answer",), passing=True))
    command = asyncio.create_task(asyncio.to_thread(main, ["fleet", "scale", "chat", "both=2", "--wait-s=60"]))
    try:
        said = ""
        while said.count("waiting: the control service does not answer") < 1:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert not command.done()
        ledger.write_status(replace(seen, settled=True))
        assert await command == 0
    finally:
        ledger.write_status(replace(seen, trouble=("it is over",)))
        await command
        lease.close()
    assert "chat is up: http://127.0.0.1:9" in capsys.readouterr().out


def test_counts_are_checked_when_a_fleet_is_scaled(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(state / "fleets" / "chat")
    before = ledger.apply(read_fleet(state.parent / "chat.toml"))
    for count in ("both=-1", "both=99999", "both=" + "9" * 5000, "both=²", "both", "=3", "boht=3"):
        assert main(["fleet", "scale", "chat", count]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert ledger.desired_state() == before


def test_a_name_of_none_is_said_with_the_nearest_that_there_is(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(state / "fleets" / "chat").apply(read_fleet(state.parent / "chat.toml"))
    for command, said in (
        (["status", "chap"], "'chap' is not a known fleet; did you mean 'chat'?"),
        (["scale", "chat", "bohh=2"], "'bohh' is not a known role; did you mean 'both'?"),
        (["scale", "chat", "unit=2"], "'unit' is not a known role; known: both"),
    ):
        assert main(["fleet", *command]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.processes
def test_what_is_done_is_shown_from_the_first_step_on_and_nobody_waits_while_all_is_paused(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = state.parent / "chat.toml"
    none = SPEC.replace("[role.both]", "[role.both]\ncount = 0")
    spec.write_text(none.replace("[router]\ncount = 0", "[router]\ncount = 1"))
    try:
        assert main(["fleet", "apply", str(spec)]) == 0
        shown = capsys.readouterr()
        assert "start router-0: 1 desired\n" in shown.err
        assert shown.out.startswith("chat is up: http://")
        for command in (["pause", "chat"], ["scale", "chat", "both=1"]):
            assert main(["fleet", *command]) == 0
            assert "chat is paused: nothing is started" in capsys.readouterr().out
    finally:
        assert main(["fleet", "delete", "chat"]) == 0


def end_controller(ledger: Ledger) -> None:
    holder = ledger.controller
    assert holder is not None
    holder.kill()


@pytest.mark.processes
def test_a_run_that_only_waits_keeps_nobody_from_changing_the_fleet_and_overrules_it_once_it_acts(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = state.parent / "chat.toml"
    spec.write_text(SPEC.replace("[role.both]", "[role.both]\ncount = 0\nmax = 1"))
    assert main(["fleet", "apply", str(spec), "--wait-s", "0"]) == 0
    ledger = Ledger(state / "fleets" / "chat")
    with subprocess.Popen([*PROGRAM, "fleet", "run", str(spec)], stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            assert "waiting in case it ends" in running.stderr.readline()
            assert ledger.desired_state().source == str(spec)
            assert main(["fleet", "pause", "chat"]) == 0, capsys.readouterr().err
            end_controller(ledger)
            while not ((holder := ledger.controller) and holder.pid == running.pid and ledger.desired_state().source):
                time.sleep(0.01)
            assert not ledger.desired_state().fleet.roll.pause  # as the file says
            assert main(["fleet", "pause", "chat"]) == 2
            assert "change that file, or end it first" in capsys.readouterr().err
        finally:
            running.terminate()
    assert main(["fleet", "delete", "chat"]) == 0


@pytest.mark.processes
def test_paths_of_a_spec_begin_where_it_was_applied_whoever_starts_the_controller(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "m").symlink_to(Path(catalog.__file__).with_name("tiny_python"))
    monkeypatch.chdir(tmp_path / "there")
    spec = state.parent / "chat.toml"
    spec.write_text(SPEC.replace("kvferry/tiny-python", "m").replace("[role.both]", "[role.both]\ncount = 0"))
    assert main(["fleet", "apply", str(spec), "--wait-s", "0"]) == 0
    ledger = Ledger(state / "fleets" / "chat")
    try:
        end_controller(ledger)
        until(lambda: not ledger.has_controller)
        monkeypatch.chdir(tmp_path)
        assert main(["fleet", "scale", "chat", "both=0"]) == 0, capsys.readouterr().err
        holder = ledger.controller
        assert holder is not None
        assert Path(f"/proc/{holder.pid}/cwd").readlink() == tmp_path / "there"
    finally:
        assert main(["fleet", "delete", "chat"]) == 0


@pytest.mark.processes
def test_a_fleet_without_a_controller_is_deleted_however_soon_its_next_one_has_ended(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "POLL_INTERVAL_S", 0.0)
    ledger = Ledger(state / "fleets" / "chat")
    ledger.apply(read_fleet(state.parent / "chat.toml"))
    looked = type(ledger).has_controller
    # As if every look came too early or too late: between two of them, the controller begins and ends.
    monkeypatch.setattr(Ledger, "has_controller", property(lambda one: looked.fget(one) and False))
    assert main(["fleet", "delete", "chat"]) == 0
    assert capsys.readouterr().out == "chat: ended\n"
    assert not ledger.exists


def test_a_state_folder_that_cannot_be_written_to(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state.write_text("a file")
    assert main(["fleet", "apply", str(state.parent / "chat.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written to: Not a directory" in line


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_the_fleet_of_another_user_is_left_alone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(state / "fleets" / "chat")
    ledger.apply(read_fleet(state.parent / "chat.toml"))
    os.chown(ledger.folder, 65534, 65534)
    for command in (["apply", str(state.parent / "chat.toml")], ["resume", "chat"], ["delete", "chat"]):
        assert main(["fleet", *command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is another user's" in line
