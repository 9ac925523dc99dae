"""A spec as a file that changes while it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.spec.fleet_spec import fleet_from
from kvferry.fleet.spec.spec_file import SpecFile, to_table

TEXT = 'name = "f"\nmodel = "m"\nmode = "pooling"\n[role.both]\ncount = {}\n'


def write(path: Path, text: str) -> None:
    """As a new file, which is another one at once."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, path)  # noqa: PTH105


async def test_a_change_is_followed_and_a_mistake_is_not(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    write(path, TEXT.format(2))
    file = SpecFile(path)
    assert file.fleet.role["both"].count == 2
    write(path, TEXT.format(3))
    assert (await file.follow()).role["both"].count == 3
    write(path, "name = 3")
    assert (await file.follow()).role["both"].count == 3
    write(path, TEXT.format(4))
    assert (await file.follow()).role["both"].count == 4
    path.unlink()
    assert (await file.follow()).role["both"].count == 4


def test_a_wrong_file_is_refused_unless_there_was_a_right_one(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    write(path, "name = 3")
    with pytest.raises(ConfigError):
        SpecFile(path)
    before = fleet_from({"name": "f", "model": "m", "mode": "pooling", "role": {"both": {"count": 5}}})
    assert SpecFile(path, before=before).fleet is before


def test_tables_make_the_same_fleet_again() -> None:
    tables = {
        "name": "f",
        "model": "m",
        "mode": "pooling",
        "role": {"prefill": {"count": 2}, "decode": {"count": 1}},
        "roll": {"surge": 2},
        "failure": {"backoff": ["2s", "8s"]},
    }
    fleet = fleet_from(tables)
    assert fleet_from(to_table(fleet)) == fleet
    assert to_table(fleet)["roll"] == {"surge": 2}, "what is as by default is left out"
