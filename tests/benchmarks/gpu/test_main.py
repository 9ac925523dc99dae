"""`make gpu` as a person runs it, on a machine without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

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
    """The copies to host memory and back, on the stand-in for the driver; CI runs all steps."""
    done = run(tmp_path, "--steps=offload", KVFERRY_GPU="fake")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to keep the results" not in done.stdout
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Run)
    assert report.fake
    assert "out, 64 KiB a layer" in report.figures
    assert "Measured:" in (tmp_path / "report.md").read_text()


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
