"""Plots: what cannot be written is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cli.cache.plot import check_plot
from kvferry.core.errors import ConfigError


@pytest.mark.parametrize("name", ["a.svg", "a.PNG"])
def test_names_that_say_the_format_are_taken(tmp_path: Path, name: str) -> None:
    check_plot(tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["a", "a.pdf", "svg", "a.svg.gz"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--plot .*: the name must end in \.svg or \.png"):
        check_plot(tmp_path / name)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        check_plot(tmp_path / "nowhere" / "a.svg")
