"""Findings about GPUs and RDMA, on machines that are folders in place of /dev and /sys, and files in place of tools'
outputs: `ucx_info_without_rdma` is UCX 1.13's, the others are written in the form that the tools use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.cli.doctor.finding import Finding
from kvferry.cli.doctor.machine import Hardware, examine_gpus, examine_rdma, read_topology, run_tool

CAPTURED = Path(__file__).parent / "captured"


def captured(name: str) -> str:
    return (CAPTURED / f"{name}.txt").read_text()


def tools(**outputs: str | None) -> Callable[..., str | None]:
    """A runner of programs that gives these outputs: `names` and `topology` are nvidia-smi's."""

    def run(*command: str) -> str | None:
        if command[0] == "nvidia-smi":
            return outputs.get("topology" if "topo" in command else "names")
        return outputs.get(command[0])

    return run


def machine(
    folder: Path,
    *,
    devices: tuple[str, ...] = (),
    nixl: str | None = "1.5.1",
    memlock: int = -1,
    tls: str = "",
    **more: str,
) -> Hardware:
    """A machine with these devices in /dev."""
    for name in devices:
        path = folder / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    variables = {"UCX_TLS": tls} if tls else {}
    return Hardware(variables, tools(**more), folder / "dev", folder / "sys", memlock, nixl)


def add_rdma(folder: Path, name: str, state: str = "4: ACTIVE") -> None:
    port = folder / "sys" / "class" / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")


def problems(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.verdict == "problem"]


def test_gpus_that_are_all_joined_by_nvlink(tmp_path: Path) -> None:
    names = "\n".join(["NVIDIA H100 80GB HBM3, 81559 MiB"] * 8)
    found = list(examine_gpus(machine(tmp_path, devices=("nvidiactl",), names=names, topology=captured("topo_nvlink"))))
    assert [finding.text for finding in found] == [
        "8 × NVIDIA H100 80GB HBM3, 81559 MiB",
        "GPUs are joined by NVLink (NV18)",
    ]


@pytest.mark.parametrize(
    ("matrix", "count", "text"),
    [
        ("topo_pcie", 2, "1 of 1 pairs of GPUs are joined by PCIe, not NVLink: GPU0-GPU1 PHB"),
        ("topo_pairs", 4, "4 of 6 pairs of GPUs are joined by PCIe, not NVLink: GPU0-GPU2 SYS, GPU0-GPU3 SYS"),
    ],
)
def test_pairs_of_gpus_without_nvlink_are_named(matrix: str, count: int, text: str, tmp_path: Path) -> None:
    names = "\n".join(["NVIDIA A40, 46068 MiB"] * count)
    *_, links = examine_gpus(machine(tmp_path, devices=("nvidiactl",), names=names, topology=captured(matrix)))
    assert links.verdict == "unknown"
    assert links.text.startswith(text)


@pytest.mark.parametrize("matrix", ["", "No devices were found", "GPU0", "\tGPU0\tGPU1\nGPU0\tX", "GPU1 GPU0\nGPU1 X"])
def test_a_matrix_that_cannot_be_read_is_no_link(matrix: str) -> None:
    assert read_topology(matrix) == {}


def test_gpus_that_are_not_examined(tmp_path: Path) -> None:
    assert [finding.verdict for finding in examine_gpus(machine(tmp_path / "none"))] == ["good"]
    [amd] = examine_gpus(machine(tmp_path / "amd", devices=("kfd",)))
    assert "AMD" in amd.text
    [silent] = examine_gpus(machine(tmp_path / "silent", devices=("nvidiactl",)))
    assert (silent.verdict, silent.remedy) == ("problem", "nvidia-smi")


def test_an_active_rdma_device_that_this_process_can_use(tmp_path: Path) -> None:
    add_rdma(tmp_path, "mlx5_0")
    hardware = machine(tmp_path, devices=("infiniband/uverbs0",), ucx_info=captured("ucx_info_with_rdma"))
    found = list(examine_rdma(hardware))
    assert [finding.text for finding in found] == ["RDMA: mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR))"]


def test_kv_over_tcp_beside_an_rdma_device_is_a_problem(tmp_path: Path) -> None:
    add_rdma(tmp_path, "mlx5_0", "1: DOWN")
    assert problems(list(examine_rdma(machine(tmp_path)))) == ["RDMA: no port of mlx5_0 is active: KV goes over TCP"]
    add_rdma(tmp_path, "mlx5_1")
    hardware = machine(tmp_path, memlock=65536, ucx_info=captured("ucx_info_without_rdma"))
    assert problems(list(examine_rdma(hardware))) == [
        "RDMA: there is no /dev/infiniband/uverbs* here: KV goes over TCP",
        "at most 64.0 KiB may be locked, which RDMA needs for KV",
        "this machine's UCX has no transport over RDMA: KV goes over TCP",
    ]


@pytest.mark.parametrize(
    ("tls", "rdma", "gpu"),
    [
        ("", True, True),
        ("all", True, True),
        ("rc_x,cuda_copy,cuda_ipc", True, True),
        ("ib,cuda", True, True),
        ("\\rc,self,sm", True, False),
        ("tcp,cuda_copy", False, True),
        ("tcp,sm,self", False, False),
        ("^tcp", True, True),
        ("^ib", False, True),
        ("^rc,dc,ud,cuda", False, False),
        ("^rc_verbs", True, True),
    ],
)
def test_what_a_value_of_ucx_tls_leaves_to_nixl(tls: str, rdma: bool, gpu: bool, tmp_path: Path) -> None:
    add_rdma(tmp_path, "mlx5_0")
    found = problems(list(examine_rdma(machine(tmp_path, devices=("infiniband/uverbs0", "nvidiactl"), tls=tls))))
    assert any("no RDMA" in text for text in found) == (not rdma)
    assert any("no GPU memory" in text for text in found) == (not gpu)


def test_without_rdma_nixl_goes_over_tcp(tmp_path: Path) -> None:
    assert [finding.verdict for finding in examine_rdma(machine(tmp_path))] == ["unknown"]
    assert list(examine_rdma(machine(tmp_path, nixl=None))) == []


def test_a_program_that_is_not_there_or_fails_has_no_output() -> None:
    assert run_tool("a-program-that-nobody-has") is None
    assert run_tool("false") is None
    assert run_tool("echo", "text") == "text"
