"""Memory and devices of one machine, divided among servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.fleet.processes.vllm.resources import cpu_memory_arguments, share_devices, visible_devices


@pytest.mark.parametrize(
    ("num_instances", "shares"),
    [(1, [["0", "1", "2", "3"]]), (2, [["0", "1"], ["2", "3"]]), (3, [["0"], ["1"], ["2"]])],
)
def test_each_server_has_as_many_devices(num_instances: int, shares: list[list[str]]) -> None:
    devices = ["0", "1", "2", "3"]
    assert [list(share_devices(devices, index, num_instances)) for index in range(num_instances)] == shares


def test_fewer_devices_than_servers_are_taken_in_turn() -> None:
    assert [share_devices(["a", "b"], index, 5)[0] for index in range(5)] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("value", "devices"), [("", []), ("-1", []), ("0, 2", ["0", "2"]), ("GPU-1,,GPU-2", ["GPU-1", "GPU-2"])]
)
def test_the_variable_decides(value: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == devices


def test_without_the_variable_all_devices_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "2", "10"]


@pytest.mark.parametrize(
    "arguments", [["--kv-cache-memory-bytes=1"], ["--kv_cache_memory_bytes", "1"], ["--gpu-memory-utilization=0.5"]]
)
def test_what_a_user_sets_stays(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert cpu_memory_arguments(arguments, 2) == []
    assert cpu_memory_arguments([], 1) == []
    flag, value = cpu_memory_arguments([], 2)
    assert flag == "--kv-cache-memory-bytes"
    assert 0 < int(value) <= 4 * 2**30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert cpu_memory_arguments([], 2) == []
