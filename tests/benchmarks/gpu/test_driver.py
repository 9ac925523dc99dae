"""The calls of the CUDA driver, against a stand-in for libcuda in C: arguments have their real types there, copies are
as late as a GPU may make them, and each call is recorded."""

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import transfer
from gpu.double import driver

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in."""
    return driver.build(tmp_path_factory.mktemp("driver"))


def run_program(library: Path, folder: Path, code: str) -> list[str]:
    """Run a program with the stand-in; returns the recorded calls."""
    calls = folder / "calls"
    environment = {**driver.environment(library, calls), "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines()


def require_balanced(calls: list[str]) -> None:
    """Each context, stream, allocation, module and mapping is given back."""
    counts = Counter(call.split()[0] for call in calls)
    for taken, returned in (
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
        ("cuStreamCreate", "cuStreamDestroy_v2"),
        ("cuMemHostAlloc", "cuMemFreeHost"),
        ("cuModuleLoadData", "cuModuleUnload"),
        ("cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"),
    ):
        assert counts[taken] == counts[returned], (taken, counts)
    assert "left: streams 0, host allocations 0, modules 0, mappings 0" in calls[-1]


def test_blocks_between_two_processes(library: Path, tmp_path: Path) -> None:
    """The whole of the fabric `cuda_ipc`; the reading process compares every byte."""
    options = argparse.Namespace(
        blocks=[16, 64],
        repeat=1,
        cores=None,
        memories=("double", "double"),
        environment=driver.environment(library, tmp_path / "calls"),
        timeout_s=120.0,
    )
    done = transfer.run("kvferry cuda_ipc", 4, options)
    assert [line["block"] for line in done.lines] == [16384, 65536], done.log
    calls = (tmp_path / "calls").read_text().splitlines()
    require_balanced(calls)
    launches = [call for call in calls if call.startswith("cuLaunchKernel")]
    assert {call.rsplit(" ", 1)[1] for call in launches} == {"256", "64"}
    assert all("grid 32 1 1 block 512 1 1" in call for call in launches)


STORES = """
import numpy as np
from kvferry.connectors.kv_store.blocks import DeviceBlocks
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.transport.memory import BlockMemory
from kvferry.transport.shared_memory import SharedSegment

layout = KVLayout(model_fingerprint="m", layers=(LayerLayout(2, 8, 8),) * 3, dtype="bfloat16", block_size=4)
segment = SharedSegment.create(8 * layout.block_bytes)
words = np.frombuffer(segment.buffer, np.uint8)
words[:] = np.arange(len(words)) % 251
memory = BlockMemory.dense(layout, 8, segment.address, device="cuda:0")
blocks = DeviceBlocks(memory, None, allocate=lambda num_bytes: memoryview(bytearray(num_bytes)))
found = blocks.begin_copy([5, 2]).end()
for block_id, views in zip([5, 2], found):
    for layer, view in enumerate(views):
        [(offset, length)] = memory.spans(layer, [block_id])
        assert bytes(view) == words[offset : offset + length].tobytes()
blocks.close()
"""


def test_blocks_to_host_memory(library: Path, tmp_path: Path) -> None:
    """Both streams give back all that they took, the contexts of the driver included."""
    calls = run_program(library, tmp_path, STORES)
    require_balanced(calls)
    assert sum(call.startswith("cuDevicePrimaryCtxRetain") for call in calls) == 2


REFUSED = """
from kvferry.core.errors import ConfigError, PeerLost
from kvferry.transport.cuda.driver import CudaDriver

driver = CudaDriver("cuda:0")
for error, call in (
    (ConfigError, lambda: driver.export(4096)),
    (PeerLost, lambda: driver.open(bytes(64))),
    (PeerLost, lambda: driver.allocation(4096)),
):
    try:
        call()
    except error as told:
        print(told)
    else:
        raise SystemExit(f"not refused: {error}")
driver.close()
"""


def test_what_the_driver_refuses_is_an_error_of_ours(library: Path, tmp_path: Path) -> None:
    calls = run_program(library, tmp_path, REFUSED)
    assert "left: streams 0, host allocations 0, modules 0, mappings 0" in calls[-1]
