"""What `nvidia-smi` says of the GPUs, and what else may come of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu.card import NoCard, find_cards, links, visible_devices
from gpu.double.driver import FOLDER
from gpu.mps import mps
from gpu.records import NotPossible

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a shell script on the path, under a name."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return install


def test_the_stand_in_for_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{FOLDER}{os.pathsep}{os.environ['PATH']}")
    [card] = find_cards()
    assert (card.name, card.driver, card.capability) == ("Stand-in for a GPU", "none", "9.0")
    assert card.slug == "stand-in-for-a-gpu"
    assert "GPU0" in links()


def test_two_gpus_and_columns_that_a_driver_lacks(install: Install) -> None:
    install(
        "nvidia-smi",
        'echo "NVIDIA H100 80GB HBM3, 580.1, 9.0, 81559, Default, 5"; echo "GPU, 1, [N/A], [N/A], [N/A], [N/A]"',
    )
    first, second = find_cards()
    assert (first.slug, first.memory_mib) == ("nvidia-h100-80gb-hbm3", 81559)
    assert second.memory_mib == 0


def test_gpus_that_are_hidden_do_not_count(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("nvidia-smi", 'case "$*" in *--id=3,GPU-7*) echo "H100, 1, 9.0, 8, Default, 5";; *) exit 9;; esac')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-7")
    assert [card.name for card in find_cards()] == ["H100"]
    assert visible_devices() == ["3", "GPU-7"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        with pytest.raises(NoCard, match="hides all GPUs"):
            find_cards()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", "NVIDIA-SMI has failed"),
        ("exit 3", "exit status 3"),
        ("exit 0", "lists no GPU"),
        ("echo one, two", "6 columns were expected"),
    ],
)
def test_reasons_why_there_is_no_gpu(install: Install, script: str, reason: str) -> None:
    install("nvidia-smi", script)
    with pytest.raises(NoCard, match=reason):
        find_cards()


def test_no_nvidia_smi(install: Install) -> None:
    with pytest.raises(NoCard, match="no NVIDIA GPU here"):
        find_cards()


DAEMON = 'echo started > "$CUDA_MPS_PIPE_DIRECTORY/control"; exec sleep 600'


def test_mps_that_clients_cannot_use(install: Install, tmp_path: Path) -> None:
    """The stand-in for the daemon runs; the client finds no GPU."""
    install("nvidia-cuda-mps-control", DAEMON)
    with pytest.raises(NotPossible, match="MPS starts, but its clients fail"), mps(tmp_path / "mps"):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("script", "reason"), [(None, "not installed"), ("echo no device; exit 1", "does not start: no device")]
)
def test_mps_that_does_not_start(install: Install, tmp_path: Path, script: str | None, reason: str) -> None:
    if script is not None:
        install("nvidia-cuda-mps-control", script)
    with pytest.raises(NotPossible, match=reason), mps(tmp_path / "mps"):
        raise AssertionError("not reached")
