"""The Python environment with vLLM: what is wrong with it is said before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.vllm.environment import find_vllm, require_module


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine-python /nowhere/python is not a file"):
        find_vllm("/nowhere/python")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo no json", "is not a Python that works: no output"),
        ("echo broken >&2; exit 1", "is not a Python that works: broken"),
        ('echo "{}"', "is not a Python that works"),
        (
            """echo '{"vllm":"","on_cpu":false,"kvferry":false,"missing_libraries":[],"connectors":[]}'""",
            "there is no vLLM in the environment",
        ),
    ],
)
def test_a_program_that_is_no_python_with_vllm_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_vllm(program(tmp_path / "python", text))


def test_what_it_says_is_taken_over(tmp_path: Path) -> None:
    answer = '{"vllm":"0.32.0","on_cpu":true,"kvferry":true,"missing_libraries":["nixl"],"connectors":["A"]}'
    path = program(tmp_path / "python", f"echo '{answer}'")
    found = find_vllm(path)
    assert (found.python, found.version, found.has_kvferry, found.on_cpu) == (path, "0.32.0", True, True)
    assert (found.missing_libraries, found.connectors) == (("nixl",), ("A",))


def test_a_module_must_be_importable_there() -> None:
    require_module(sys.executable, "json.decoder")
    with pytest.raises(ConfigError, match=r"kv_connector_module_path 'no_such_module' cannot be imported"):
        require_module(sys.executable, "no_such_module")
    with pytest.raises(ConfigError, match=r"the flag 'no_such\.module' cannot be imported"):
        require_module(sys.executable, "no_such.module", "the flag")
    require_module("/nowhere/python", "anything")  # it is vLLM's to say
