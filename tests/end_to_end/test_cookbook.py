"""The recipes of docs/cookbook.md print what the page says they print."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.envoy import ENVOY
from support.recipes import Kitchen, environment, recipes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

RECIPES = recipes()
OTHER = {"Your own vLLM"}
"""Recipes that are run with an engine of another environment (`vllm`)."""


def test_each_block_of_output_belongs_to_a_command() -> None:
    assert len(RECIPES) == 9
    assert all(any(step.printed for step in steps) for steps in RECIPES.values())


@pytest.mark.full
@pytest.mark.parametrize("title", [title for title in RECIPES if title not in OTHER])
def test_a_recipe_prints_what_the_page_says(title: str, tmp_path: Path) -> None:
    variables = environment(tmp_path, RAY_USAGE_STATS_ENABLED="0")
    variables.pop("RAY_ADDRESS", None)
    if title == "Ray":
        pytest.importorskip("ray")
    if title == "Envoy":
        if not ENVOY.is_file():
            pytest.skip("needs Envoy: make install-gateway")
        (tmp_path / "bin/envoy").symlink_to(ENVOY)
    if title == "A Valkey tier":
        for program, older in (("valkey-server", "redis-server"), ("valkey-cli", "redis-cli")):
            path = shutil.which(program) or shutil.which(older)
            if path is None:
                pytest.skip(f"needs {program}")
            (tmp_path / "bin" / program).symlink_to(path)
    with ExitStack() as ends:
        kitchen = Kitchen(tmp_path, variables, ends)
        for step in RECIPES[title]:
            kitchen.run(step)
