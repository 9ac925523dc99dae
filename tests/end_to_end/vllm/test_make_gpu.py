"""The steps of `make gpu` that start vLLM, in small sizes with vLLM for CPUs, through the code that runs on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.vllm_servers import vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
NOT_ON_CPUS = "LMCache, CPU tier does not run: "
"""LMCache 0.5.6 has nothing that copies KV of vLLM for CPUs."""


def run(folder: Path, *steps: str, **environment: str) -> tuple[str, dict[str, float], list[str]]:
    """Run steps; returns what was printed, the values of the figures by name, and the notes."""
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "gpu", f"--folder={folder}", f"--steps={','.join(steps)}"],
        env={**vllm_environment(), "KVFERRY_GPU": "fake", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    records = [record for outcome in report["outcomes"] for record in outcome["records"]]
    figures = {record["name"]: record["value"] for record in records if record["type"] == "figure"}
    return done.stdout, figures, [record["text"] for record in records if record["type"] == "note"]


def test_the_vllm_sides_of_the_picture(tmp_path: Path) -> None:
    printed, figures, notes = run(tmp_path, "picture", KVFERRY_GPU_SIDES="vLLM")
    assert "3 of 3 sides were up" in " ".join(notes)
    for side in ("2 plain vLLM", "vLLM 1P+1D, NixlConnector", "vLLM 1P+1D, KvferryP2pConnector"):
        for title in ("ITL P99", "longest gap", "longest TTFT of long prompts"):
            assert figures[f"2 streams, {side}: {title}"] > 0
    assert not [note for note in notes if "does not run" in note]
    logs = [path.read_text() for path in (tmp_path / "picture").glob("vllm-1p-1d-kvferry*-[01].log")]
    assert len(logs) == 2
    assert all("KvferryP2pConnector" in log for log in logs)
    assert "picture" in printed


@pytest.mark.full
def test_the_vllm_sides_of_engine_and_lmcache(tmp_path: Path) -> None:
    _, figures, notes = run(tmp_path, "engine", "lmcache")
    for graphs in ("CUDA graphs", "eager"):
        assert figures[f"decode b2, context 16, beside vLLM, {graphs}"] > 0
        assert figures[f"prefill b1, 48 tokens, beside vLLM, {graphs}"] > 0
    assert figures["a hit, kvferry, CPU tier: TTFT"] > 0
    assert [note for note in notes if "does not run" in note and not note.startswith(NOT_ON_CPUS)] == []
