"""What is kept of a fleet: changed by several at once, read while it is written, bounded."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.control import ledger as module
from kvferry.fleet.control.ledger import DesiredState, FleetStatus, Ledger
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from


def fleet(count: int = 1, seed: int = 0, history: int = 10) -> DesiredFleet:
    """`seed` makes the revision."""
    return fleet_from(
        {
            "name": "f",
            "model": "m",
            "mode": "pooling",
            "args": [f"--seed={seed}"],
            "role": {"both": {"count": count}},
            "roll": {"history": history},
        }
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "fleets" / "f")


def test_a_fleet_that_nobody_wants(ledger: Ledger) -> None:
    assert not ledger.exists
    assert ledger.status() is None
    assert list(ledger.history()) == []
    with pytest.raises(ConfigError, match="there is no fleet in"):
        ledger.desired_state()


def test_what_is_wanted_is_what_is_read(ledger: Ledger) -> None:
    told = ledger.apply(fleet(3))
    assert (told.number, told.earlier, told.deleted) == (1, (), False)
    assert Ledger(ledger.folder).desired_state() == told
    assert told.fleet.revision == fleet(3).revision
    assert ledger.exists
    assert stat.S_IMODE(ledger.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((ledger.folder / "wanted.json").stat().st_mode) == 0o600


def test_earlier_revisions_are_kept_and_bounded(ledger: Ledger) -> None:
    for seed in range(5):
        ledger.apply(fleet(seed=seed, history=3))
    assert ledger.apply(fleet(7, seed=4, history=3)).number == 6  # other numbers are no other revision
    assert [one.args for one in ledger.desired_state().earlier] == [("--seed=3",), ("--seed=2",), ("--seed=1",)]
    back = ledger.apply(fleet(seed=2, history=3))
    assert [one.args for one in back.earlier] == [("--seed=4",), ("--seed=3",), ("--seed=1",)]


def test_a_fleet_that_was_deleted_begins_anew(ledger: Ledger) -> None:
    ledger.apply(fleet(seed=1))
    ledger.delete()
    assert ledger.desired_state().deleted
    assert ledger.desired_state().number == 2
    again = ledger.apply(fleet(seed=2))
    assert (again.deleted, again.earlier, again.number) == (False, (), 3)


def test_no_change_is_lost_when_many_change_it(ledger: Ledger) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda seed: ledger.apply(fleet(seed=seed, history=100)).number, range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert len(ledger.desired_state().earlier) == 39


def test_what_cannot_be_read_is_said(ledger: Ledger) -> None:
    ledger.apply(fleet())
    (ledger.folder / "wanted.json").write_text("{")
    with pytest.raises(ConfigError, match=r"wanted\.json cannot be read"):
        ledger.desired_state()


def test_bytes_that_are_no_text_are_what_cannot_be_read(ledger: Ledger) -> None:
    ledger.apply(fleet())
    lease = ledger.try_acquire()
    assert lease is not None
    ledger.record("start", "both-0")
    for name, text in {
        "wanted.json": b'{"fleet": {"name": "\xff"}}',
        "status.json": b'{"url": "\xff"}',
        "scaled.json": b'{"prefill": "\xff"}',
        "controller.lock": b'{"pid": "\xff"}',
        "history.jsonl": b'{"what": "\xff"}\n',
    }.items():
        (ledger.folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match=r"wanted\.json cannot be read"):
        ledger.desired_state()
    assert (ledger.status(), ledger.scaled_counts(), ledger.controller) == (None, None, None)
    assert list(ledger.history()) == []
    lease.close()


def test_the_history_is_in_order_and_lines_that_are_torn_are_passed_over(ledger: Ledger) -> None:
    ledger.apply(fleet())
    ledger.record("start", "both-0", "1 desired")
    with (ledger.folder / "history.jsonl").open("ab") as file:
        file.write(b'{"at": 1, "what": "to\nnonsense\n\xff\xfe\n')
    ledger.record("up", reason="http://a:1")
    assert [(one.what, one.name, one.reason) for one in ledger.history()] == [
        ("start", "both-0", "1 desired"),
        ("up", "", "http://a:1"),
    ]


def test_the_history_is_bounded_and_keeps_the_newest(ledger: Ledger) -> None:
    ledger.max_history_bytes = 2000
    ledger.apply(fleet())
    for number in range(500):
        ledger.record("start", f"both-{number}")
        assert (ledger.folder / "history.jsonl").stat().st_size <= 2000
    names = [one.name for one in ledger.history()]
    assert names == [f"both-{number}" for number in range(500 - len(names), 500)]
    assert len(names) > 5


def test_one_line_that_is_longer_than_all_that_is_kept(ledger: Ledger) -> None:
    ledger.max_history_bytes = 200
    ledger.apply(fleet())
    ledger.record("failed", "both-0", "x" * 1000)
    ledger.record("start", "both-0")
    assert [one.what for one in ledger.history()][-1] == "start"


def test_status(ledger: Ledger) -> None:
    ledger.apply(fleet())
    status = FleetStatus(at=1.0, pid=2, number=1, url="", roles={}, members=(), trouble=("both: failed",))
    ledger.write_status(status)
    assert ledger.status() == status
    (ledger.folder / "status.json").write_text("{}")
    assert ledger.status() is None


def test_one_controller_acts_at_a_time(ledger: Ledger) -> None:
    assert not ledger.has_controller
    assert not ledger.folder.exists()  # whoever only looks makes nothing
    first = ledger.try_acquire()
    assert first is not None
    assert ledger.try_acquire() is None
    assert Ledger(ledger.folder).has_controller
    first.close()
    assert not ledger.has_controller
    second = ledger.try_acquire()
    assert second is not None
    second.close()


def test_changes_that_follow_from_what_is_are_made_one_after_the_other(ledger: Ledger) -> None:
    """Two `kvferry fleet scale` at once both count."""
    ledger.apply(fleet(0))

    def one_more(desired: DesiredState) -> DesiredFleet:
        return fleet(desired.fleet.role["both"].count + 1)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: ledger.change(one_more), range(40)):
            pass
    assert ledger.desired_state().fleet == fleet(40)


def test_a_fleet_that_is_ending_is_not_brought_back_by_a_change(ledger: Ledger) -> None:
    ledger.apply(fleet())
    ledger.delete()
    with pytest.raises(ConfigError, match="f is ending; once it has ended"):
        ledger.change(lambda desired: desired.fleet)
    assert ledger.desired_state().deleted


def test_a_fleet_is_forgotten_once_it_has_ended_and_nobody_wants_it(ledger: Ledger, tmp_path: Path) -> None:
    other = tmp_path / "members"
    other.mkdir()
    ledger.apply(fleet())
    assert not ledger.remove(other)
    ledger.delete()
    lease = ledger.try_acquire()
    assert lease is not None
    assert not ledger.remove(other)
    lease.close()
    ledger.apply(fleet())  # somebody applies it at this moment
    assert not ledger.remove(other)
    assert other.exists()
    ledger.delete()
    assert ledger.remove(other)
    assert not ledger.folder.exists()
    assert not other.exists()


def test_who_waits_for_a_ledger_that_is_removed_makes_another(ledger: Ledger) -> None:
    """However many apply and delete a fleet at once, each of them has a ledger of its own or that of all."""

    def apply_and_delete(seed: int) -> None:
        for _ in range(10):
            ledger.apply(fleet(seed=seed))
            with suppress(ConfigError):  # another one has
                ledger.delete()
                ledger.remove()

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(apply_and_delete, range(4)):
            pass
    assert not ledger.has_controller
    ledger.apply(fleet(seed=7))
    assert ledger.desired_state().fleet == fleet(seed=7)


def test_a_file_that_cannot_be_read_is_put_aside_when_the_spec_is_applied_again(ledger: Ledger) -> None:
    ledger.apply(fleet())
    ledger.write_status(FleetStatus(at=1.0, pid=2, number=6, url="", roles={}, members=()))
    (ledger.folder / "wanted.json").write_text("{")
    with pytest.raises(ConfigError, match="apply the fleet's spec again"):
        ledger.change(lambda desired: desired.fleet)
    assert ledger.apply(fleet(3)).number == 7  # which the controller has not seen yet
    assert ledger.desired_state().fleet == fleet(3)
    assert (ledger.folder / "wanted.json.unreadable").read_text() == "{"


def test_a_full_disk_leaves_no_drafts(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.apply(fleet())
    before = {one.name for one in ledger.folder.iterdir()}

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="cannot be written to: No space left"):
        ledger.apply(fleet(2))
    assert {one.name for one in ledger.folder.iterdir()} == before
    assert ledger.desired_state().fleet == fleet()


def test_who_reads_never_sees_half_of_a_file(ledger: Ledger) -> None:
    """Files are replaced as a whole."""
    ledger.apply(fleet())
    with (ledger.folder / "wanted.json").open("rb") as reader:
        ledger.apply(fleet(count=5))
        assert msgspec.json.decode(reader.read(), type=module.DesiredState).number == 1
    assert not [one.name for one in ledger.folder.iterdir() if str(os.getpid()) in one.name]
