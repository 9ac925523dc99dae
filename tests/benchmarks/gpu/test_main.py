"""`make gpu` as a person runs it, on a machine without a GPU."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

import kvferry
from gpu.__main__ import describe_package, private_folders
from gpu.report import Run

ROOT = Path(__file__).parents[3]


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "gpu", f"--folder={folder}", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_step_without_a_gpu(tmp_path: Path) -> None:
    """The copies to host memory and back, on the stand-in for the driver; CI runs all steps. Nothing is written
    outside the folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    usual = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TRITON_CACHE_DIR"), str(elsewhere))
    folder = tmp_path / "gpu"
    done = run(folder, "--steps=offload", KVFERRY_GPU="fake", **usual)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to keep the results" not in done.stdout
    assert list(elsewhere.rglob("*")) == []
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Run)
    assert report.fake
    assert "out, 64 KiB a layer" in report.figures
    assert "Measured:" in (folder / "report.md").read_text()


def test_temporary_files_stay_where_they_are_if_sockets_would_have_too_long_paths(tmp_path: Path) -> None:
    short = Path(tempfile.mkdtemp())
    assert Path(private_folders(short)["TMPDIR"]).is_relative_to(short)
    shutil.rmtree(short)
    long = private_folders(tmp_path / ("long" * 15))
    assert "TMPDIR" not in long
    assert Path(long["HOME"]).is_relative_to(tmp_path)


def test_an_interpreter_that_takes_kvferry_from_the_checkout_knows_its_plugin(tmp_path: Path) -> None:
    """Without installing it, as on a machine whose environment cannot be changed."""
    question = "from importlib.metadata import *; print(version('kvferry'), *entry_points(group=sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; {question}", "vllm.general_plugins"],  # -S: nothing is installed
        env={**os.environ, "PYTHONPATH": str(describe_package(tmp_path))},
        capture_output=True,
        text=True,
        check=True,
    )
    plugin = metadata.EntryPoint("kvferry", "kvferry.adapters.vllm:register", "vllm.general_plugins")
    assert done.stdout.strip() == f"{kvferry.__version__} {plugin}"


def test_what_is_refused(tmp_path: Path) -> None:
    unknown = run(tmp_path, "--steps=offlaod", KVFERRY_GPU="fake")
    assert (unknown.returncode, "did you mean offload?" in unknown.stderr) == (2, True)
    mode = run(tmp_path, KVFERRY_GPU="yes")
    assert (mode.returncode, "the only value is fake" in mode.stderr) == (2, True)
    nothing = run(tmp_path, KVFERRY_GPU="", PATH="/nowhere")
    assert (nothing.returncode, "KVFERRY_GPU=fake make gpu runs what can run without" in nothing.stderr) == (2, True)


def test_the_copy_kernel_assembles_where_there_is_an_assembler(tmp_path: Path) -> None:
    from gpu.ptx import ARCHITECTURES, assemble, find_ptxas
    from gpu.records import NotPossible

    try:
        ptxas = find_ptxas()
    except NotPossible as reason:
        pytest.skip(str(reason))
    assert [assemble(ptxas, architecture) for architecture in ARCHITECTURES] == [""] * len(ARCHITECTURES)
    wrong = tmp_path / "wrong.ptx"
    wrong.write_text(".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry f() { mov.u32 %r1, 3; ret; }\n")
    assert "r1" in assemble(ptxas, "sm_90", wrong)
