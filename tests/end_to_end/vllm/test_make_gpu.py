"""The steps of `make gpu` that start vLLM, in small sizes with vLLM for CPUs, through the code that runs on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.vllm_servers import vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
NOT_ON_CPUS = "LMCache, CPU tier does not run: "
"""LMCache 0.5.6 has nothing that copies KV of vLLM for CPUs."""


def run(folder: Path, *steps: str, **environment: str) -> tuple[dict[str, float], list[str]]:
    """Run steps; returns the values of the figures by name, and the notes."""
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "gpu", f"--folder={folder}", f"--steps={','.join(steps)}"],
        env={**vllm_environment(), "KVFERRY_GPU": "fake", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    records = [record for outcome in report["outcomes"] for record in outcome["records"]]
    figures = {record["name"]: record["value"] for record in records if record["type"] == "figure"}
    return figures, [record["text"] for record in records if record["type"] == "note"]


HAND_OFFS = ("vLLM 1P+1D, KvferryP2pConnector", "vLLM 1P+1D, NixlConnector")
PLAIN = "2 plain vLLM"


@pytest.mark.parametrize(
    ("part", "sides"),
    [
        pytest.param("vLLM 1P+1D", HAND_OFFS, id="hand-offs"),
        pytest.param(PLAIN, (PLAIN,), id="plain"),
    ],
)
def test_picture(tmp_path: Path, part: str, sides: tuple[str, ...]) -> None:
    figures, notes = run(tmp_path, "picture", KVFERRY_GPU_SIDES=part)
    assert f"{len(sides)} of {len(sides)} sides were up" in " ".join(notes)
    for side in sides:
        for title in ("ITL P99", "longest gap", "longest TTFT of long prompts"):
            assert figures[f"2 streams, {side}: {title}"] > 0
    assert [note for note in notes if "does not run" in note] == []
    for log in (tmp_path / "picture").glob("vllm-1p-1d-*-[01].log"):
        assert "KvferryP2pConnector" in log.read_text() or "NixlConnector" in log.read_text()


@pytest.mark.full
def test_engine_and_lmcache(tmp_path: Path) -> None:
    figures, notes = run(tmp_path, "engine", "lmcache")
    for graphs in ("CUDA graphs", "eager"):
        assert figures[f"decode b2, context 16, beside vLLM, {graphs}"] > 0
        assert figures[f"prefill b1, 48 tokens, beside vLLM, {graphs}"] > 0
    assert figures["a hit, kvferry, CPU tier: TTFT"] > 0
    assert [note for note in notes if "does not run" in note and not note.startswith(NOT_ON_CPUS)] == []
