from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.transport.fabric.shm import SHORT_BYTES, CopyPieces, copier, copy_one_by_one
from kvferry.transport.memory import Pieces

WAYS = [copy_one_by_one] if copier() is copy_one_by_one else [copy_one_by_one, copier()]


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("longest", [1, 700, 4097, 9000, SHORT_BYTES + 3])
def test_every_piece_arrives_and_nothing_else_changes(copy: CopyPieces, longest: int) -> None:
    rng = random.Random(longest)
    source = np.frombuffer(rng.randbytes(64 * longest), np.uint8)
    target = np.zeros(64 * longest, np.uint8)
    expected = target.copy()
    pieces = []
    for place in rng.sample(range(64), 40):
        start, length = rng.randrange(64), rng.randint(1, longest)
        taken = source[start * longest : start * longest + length]
        expected[place * longest : place * longest + length] = taken
        pieces.append((taken.ctypes.data, target.ctypes.data + place * longest, length))
    table = np.array(pieces, np.int64)
    copy(Pieces(table[:, 0], table[:, 1], table[:, 2]))
    assert (target == expected).all()


@pytest.mark.parametrize("environment", [{"KVFERRY_NATIVE": "0"}, {"CXX": "/nowhere/g++"}])
def test_without_a_compiler_it_goes_in_python(environment: dict[str, str], tmp_path: Path) -> None:
    code = "from kvferry.transport.fabric.shm import copier, copy_one_by_one\nassert copier() is copy_one_by_one"
    own = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, check=True, timeout=60)
    assert not list(tmp_path.rglob("*.so"))
