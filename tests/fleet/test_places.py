"""Where a fleet is kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.places import running_folder, running_path


def test_the_next_controller_finds_the_folder_of_the_one_before(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    folder = running_folder(ledger)
    try:
        assert running_path(ledger) == running_folder(ledger) == folder
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(folder)
    assert running_folder(ledger) != folder
    shutil.rmtree(running_path(ledger))


@pytest.mark.parametrize("taken", ["others may use it", "file", "another user's"])
def test_a_folder_that_somebody_took_is_replaced_by_another(taken: str, tmp_path: Path) -> None:
    """Anybody may make names in a folder that all users share; no fleet of ours waits for that."""
    ledger = Ledger(tmp_path / "ledger")
    folder = running_folder(ledger)
    shutil.rmtree(folder)
    if taken == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        if taken == "others may use it":
            folder.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            pytest.skip("only root can give files away")
    try:
        other = running_folder(ledger)
        assert other != folder
        assert running_path(ledger) == other
        shutil.rmtree(other)
    finally:
        folder.unlink() if taken == "file" else folder.rmdir()


def test_a_name_that_is_a_path_is_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    shutil.rmtree(running_folder(ledger))
    (ledger.folder / "running-is").write_text("../../etc")
    assert running_path(ledger).name == f"kvferry-{os.getuid()}-none"
