"""Fixtures that several suites share. Models are made once per test run, in a folder of their own."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from kvferry.store.machine import MACHINE
from support import dynamo_workers
from support.lmcache_server import LMCacheServer, is_installed
from support.long_files import starting_place
from support.sglang_python import PYTHON
from support.valkey_server import BINARIES, ValkeyServer, server_binary

# How fast this machine is at the moment is not what a test is about.
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvferry")

PATIENCE_S = 5.0

ModelMaker = Callable[..., Path]

# Collections would look through all that is imported again and again, now and in every test: a third of the time that
# it takes to import the tests, and a tenth of theirs.
gc.disable()


os.environ["KVFERRY_VERBOSE"] = "true"
"""Tests read the log lines that commands write to standard error."""


@pytest.fixture(scope="session", autouse=True)
def _memory_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stores in memory are found by their names, which other workers and other runs of the tests use as well."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest) -> Iterator[None]:
    """A store, or a P that writes to one, is slow here because other tests compute, and is waited for all the same;
    but in tests of what happens to those that do not answer."""
    MACHINE.min_deadline_s = 0.0 if request.node.get_closest_marker("short_deadlines") else PATIENCE_S
    yield
    MACHINE.min_deadline_s = 0.0


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that runs in this process sets up logging, to a stream that is closed after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    if root.handlers != handlers or root.level != level:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)


@pytest.fixture(scope="session")
def model_maker(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """`model_maker(architecture, **overrides)`: the folder of a tiny random model, made on first use."""
    from kvferry.models.random_model import make_random_model  # torch only where a test wants a model

    root, made = tmp_path_factory.mktemp("models"), {}

    def make(architecture: str = "llama", **overrides: object) -> Path:
        key = architecture + "".join(f"-{name}{value}" for name, value in sorted(overrides.items()))
        if key not in made:
            made[key] = make_random_model(root / key, architecture, **overrides)
        return made[key]

    return make


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "of the tests marked full, run the K-th of N parts (K from 0), chosen by name; all others as selected"
    parser.addoption("--full-part", metavar="K/N", help=help_text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`diagonal`, `--full-part`, long files first; and tests marked `vllm` are skipped where vLLM is not installed."""
    # Processes that share the tests out must have the same names for them.
    addressed = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]{6,}", item.nodeid)]
    if addressed:
        raise pytest.UsageError(f"name these tests with `ids`, not by an address: {', '.join(addressed)}")
    for name, matrix in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        leave_diagonal([item for item in matrix if item.get_closest_marker("diagonal")], name)
    if part := config.getoption("--full-part"):
        number, _, count = part.partition("/")
        left_out = [one for one in items if _is_parted(one) and crc32(_group(one).encode()) % int(count) != int(number)]
        config.hook.pytest_deselected(items=left_out)
        left = set(left_out)
        items[:] = [one for one in items if one not in left]
    items.sort(key=lambda item: starting_place(item.path))
    _skip_without_servers(items)
    # `tests` is on the path, and a folder of that name in it is a namespace package, which has no origin.
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        return
    for item in items:
        if "vllm" in item.keywords and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; make test-vllm has it"))


def _skip_without_servers(items: list[pytest.Item]) -> None:
    """SGLang's servers and Dynamo's workers run in environments of their own."""
    for item in items:
        if item.get_closest_marker("sglang") and not PYTHON.is_file():
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed; make test-sglang has it"))
        if item.get_closest_marker("dynamo") and not dynamo_workers.IS_INSTALLED:
            item.add_marker(pytest.mark.skip(reason="Dynamo is not installed; make test-dynamo has it"))


def leave_diagonal(matrix: Sequence[pytest.Item], name: str) -> None:
    """Mark `full` all cases of a test but so many that each value of each parameter is in one of them."""
    cases = [item for item in matrix if item.get_closest_marker("full") is None]
    chosen = [list(item.callspec.params.values()) for item in cases]  # type: ignore[attr-defined]
    axes = [[value for at, value in enumerate(axis) if value not in axis[:at]] for axis in zip(*chosen, strict=True)]
    kept = [[axis[number % len(axis)] for axis in axes] for number in range(max(map(len, axes), default=0))]
    assert all(one in chosen for one in kept), f"{name} has no diagonal"
    for item, one in zip(cases, chosen, strict=True):
        if one not in kept:
            item.add_marker("full")


def _is_parted(item: pytest.Item) -> bool:
    """Whether only one part has it; `full(in_every_part=True)` is in all, unless another mark says just `full`."""
    return not all(mark.kwargs.get("in_every_part") for mark in item.iter_markers("full"))


def _group(item: pytest.Item) -> str:
    """Those that share instances are in one part: the tests of a file with the same first parameter."""
    _, _, parameters = item.nodeid.partition("[")
    return f"{item.path.name} {parameters.rstrip(']').partition('-')[0]}"


def pytest_collection_finish() -> None:
    """What is imported is set aside from garbage collection, which works again in the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def valkey_of_the_run() -> Iterator[ValkeyServer]:
    """One server for all tests that need no more of it than that it is there."""
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    server = ValkeyServer()
    yield server
    server.close()


@pytest.fixture
def valkey_url(valkey_of_the_run: ValkeyServer) -> str:
    """The address of a server that is empty."""
    valkey_of_the_run.say("FLUSHALL")
    return valkey_of_the_run.url


@pytest.fixture(scope="session")
def lmcache_port() -> Iterator[int]:
    """Of one LMCache server for all tests that need no more of it than that it is there."""
    if not is_installed():
        pytest.skip("needs LMCache; scripts/install_media.sh installs it")
    server = LMCacheServer()
    yield server.port
    server.close()
