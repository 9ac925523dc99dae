"""The kinds of pipe that tests are run over."""

from __future__ import annotations

import sys
from pathlib import Path

from kvferry.testing.pipe_ends import CAPACITY, TOKEN, serving

__all__ = ["CAPACITY", "EXAMPLES", "KINDS", "TOKEN", "serving"]

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))
KINDS = {
    "plain": "plain_pipe:PlainPipe",
    "gloo": "gloo",
    "example": "unix_socket_pipe:UnixSocketPipe",
}
