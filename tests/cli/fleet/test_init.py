"""`kvferry fleet init` writes a spec that can be applied, and shows every key of its tables."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.fleet.init import spec_lines
from kvferry.cli.main import main
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from, read_fleet

KEY = re.compile(r"# ([a-z_]+ = .*|\[[a-z.]+\])")


def test_it_is_a_spec_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert main(["fleet", "init", str(path)]) == 0
    fleet = read_fleet(path)
    assert (fleet.name, fleet.num_instances, fleet.router.port) == ("mine", 2, 8000)
    assert main(["fleet", "init", str(path)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("without", ["unit", "scale"])
def test_every_key_can_be_uncommented(without: str) -> None:
    """The defaults are those of the code, as the result is the same fleet."""
    lines = [KEY.sub(r"\1", line) if KEY.fullmatch(line) else line for line in spec_lines("mine", "m")]
    text = "\n".join(lines)
    text = re.sub(rf"^\[{without}\](\n(?!\[).*)*", "", text, flags=re.M)
    if without == "scale":  # replica mode: units instead of roles
        text = re.sub(r"^\[role\.[a-z]+\](\n(?!\[).*)*", "", text, flags=re.M).replace('"pooling"', '"replica"')
    else:
        text = text.replace("unit =", "# unit =")
    fleet = fleet_from(msgspec.toml.decode(text.encode()))
    assert fleet.failure == DesiredFleet(name="mine", model="m", mode="pooling").failure
    assert (fleet.scale is None) == (without == "scale")


@pytest.mark.parametrize("name", ["", "Not A Name", "x" * 99])
def test_a_wrong_name_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "init", f"--name={name}" if name else "--name=-"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
