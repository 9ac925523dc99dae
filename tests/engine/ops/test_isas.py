"""The kernels of lesser processors, and of those with tile registers, pass every test that this machine's own pass."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.engine.ops import native

HERE = Path(__file__).parent
TESTS = ("test_linear.py", "test_experts.py", "test_attention.py", "test_norm.py")
NEEDS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw"},
    "amx-emulated": {"avx512f", "avx512bw"},
    "sse": {"sse4_2"},
}

pytestmark = pytest.mark.skipif(
    native.library() is None or platform.machine() != "x86_64", reason="no compiler, or another architecture"
)


def abilities() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("isa", NEEDS)
def test_kernels_for(isa: str) -> None:
    if not NEEDS[isa] <= abilities():
        pytest.skip(f"this processor cannot run kernels for {isa}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS)],
        env={**os.environ, native.ISA: isa},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout.splitlines()[-1], "without the kernels nothing was tested"


PRODUCTS = """
import hashlib
import torch
from kvferry.engine.ops.linear import PackedLinear

found = hashlib.sha256()
for inputs, outputs in ((64, 96), (768, 768), (77, 33), (1030, 130)):
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16()
    layer = PackedLinear(weight)
    for rows in (1, 7, 16, 17, 32, 33, 300):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
        found.update(layer(x).float().numpy().tobytes())
print(found.hexdigest())
"""


@pytest.mark.full
def test_tile_registers_and_their_emulation_agree_in_every_bit() -> None:
    """So what the emulation shows on other processors holds for these."""
    if "amx_bf16" not in abilities():
        pytest.skip("this processor has no tile registers")
    digests = [
        subprocess.run(
            [sys.executable, "-c", PRODUCTS],
            env={**os.environ, native.ISA: isa},
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        ).stdout
        for isa in ("native", "amx-emulated")
    ]
    assert len(digests[0]) > 60
    assert digests[0] == digests[1]


def test_an_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(native.ISA, "avx1024")
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
    assert "KVFERRY_ISA is 'avx1024', which is not one of native" in caplog.text
