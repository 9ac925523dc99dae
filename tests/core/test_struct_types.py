"""Struct types that several threads use at once."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading
import msgspec
from kvferry.core.struct_types import build_struct_types

sys.setswitchinterval(1e-6)
for number in range(300):
    inner = [
        msgspec.defstruct(f"Inner{number}_{index}", [(f"f{field}", int | None, None) for field in range(20)])
        for index in range(8)
    ]
    kind = msgspec.defstruct(f"Outer{number}", [(f"g{index}", field | None, None) for index, field in enumerate(inner)])
    build_struct_types()
    barrier = threading.Barrier(3)

    def decode():
        barrier.wait()
        msgspec.json.decode(b'{"g0": {"f1": 1}, "g7": {"f3": 2}}', type=kind)

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del kind, inner
"""


def test_threads_decode_a_type_that_was_built() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
