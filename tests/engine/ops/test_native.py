from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.engine.ops import native

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")

USE = "from kvferry.engine.ops.native import library; print(library().vector_length())"
MISS = (
    "import logging; logging.basicConfig(format='%(message)s')\n"
    "from kvferry.engine.ops.native import library\n"
    "print(library(), library())"
)


def start(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build for both tests of it: it takes long."""
    return tmp_path_factory.mktemp("cache")


@needs_compiler
def test_two_processes_that_start_at_once_share_one_build(cache: Path) -> None:
    both = [start(USE, cache) for _ in range(2)]
    answers = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    folder = cache / "kvferry" / "kernels"
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]  # the lock and one library


@needs_compiler
def test_a_second_start_compiles_nothing(cache: Path) -> None:
    kernels = cache / "kvferry" / "kernels"
    if not kernels.exists():  # where this test is run alone
        start(USE, cache).communicate(timeout=200)
    [built] = kernels.glob("*.so")
    before = built.stat().st_mtime_ns
    out, errors = start(USE, cache).communicate(timeout=200)
    assert out, errors
    assert built.stat().st_mtime_ns == before


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"])
def test_without_a_compiler_there_is_one_line_and_no_library(compiler: str, tmp_path: Path) -> None:
    out, errors = start(MISS, tmp_path, CXX=compiler).communicate(timeout=200)
    assert out.strip() == "None None"
    assert errors.count("plain PyTorch is used") == 1
    assert not list(tmp_path.rglob("*.so"))


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    out, errors = start(MISS, tmp_path, KVFERRY_NATIVE="0").communicate(timeout=200)
    assert (out.strip(), errors) == ("None None", "")


@needs_compiler
def test_python_and_c_agree_on_every_structure() -> None:
    loaded = native.library()
    assert loaded is not None
    for kind in (*native.Step.KINDS, native.AttentionCall, native.WriteCall, native.Step):
        size = getattr(loaded, f"sizeof_{kind.__name__}")()
        assert size == native.ctypes.sizeof(kind)
