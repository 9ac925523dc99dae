from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.engine.ops import native
from support.warm import Program

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")

USE = "from kvferry.engine.ops.native import library; print(library().vector_length())"
MISS = (
    "import logging; logging.basicConfig(format='%(message)s')\n"
    "from kvferry.engine.ops.native import library\n"
    "print(library(), library())"
)


def start(code: str, folder: Path, cache: Path, **environment: str) -> Program:
    return Program(code, folder, XDG_CACHE_HOME=str(cache), **environment)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build for both tests of it: it takes long."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """g++ that does not optimise: that takes a third of the time."""
    script = tmp_path_factory.mktemp("compiler") / "g++"
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@needs_compiler
def test_two_processes_that_start_at_once_share_one_build(cache: Path, compiler: str, tmp_path: Path) -> None:
    both = [start(USE, tmp_path / name, cache, CXX=compiler) for name in ("one", "other")]
    answers = [process.end() for process in both]
    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert int(answers[0].stdout) == int(answers[1].stdout) > 0
    folder = cache / "kvferry" / "kernels"
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]  # the lock and one library


@needs_compiler
def test_a_second_start_compiles_nothing(cache: Path, compiler: str, tmp_path: Path) -> None:
    kernels = cache / "kvferry" / "kernels"
    if not kernels.exists():  # where this test is run alone
        start(USE, tmp_path, cache, CXX=compiler).end()
    [built] = kernels.glob("*.so")
    before = built.stat().st_mtime_ns
    done = start(USE, tmp_path, cache, CXX=compiler).end()
    assert done.stdout, done.stderr
    assert built.stat().st_mtime_ns == before


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"])
def test_without_a_compiler_there_is_one_line_and_no_library(compiler: str, tmp_path: Path) -> None:
    done = start(MISS, tmp_path, tmp_path / "cache", CXX=compiler).end()
    assert done.stdout.strip() == "None None"
    assert done.stderr.count("plain PyTorch is used") == 1
    assert not list(tmp_path.rglob("*.so"))


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    done = start(MISS, tmp_path, tmp_path / "cache", KVFERRY_NATIVE="0").end()
    assert (done.stdout.strip(), done.stderr) == ("None None", "")


@needs_compiler
def test_python_and_c_agree_on_every_structure() -> None:
    loaded = native.library()
    assert loaded is not None
    for kind in (*native.KernelStep.KINDS, native.AttentionCall, native.WriteCall, native.KernelStep):
        size = getattr(loaded, f"sizeof_{kind.__name__}")()
        assert size == native.ctypes.sizeof(kind)
