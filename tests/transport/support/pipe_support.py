"""The fabrics over pipes that tests are run over."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["EXAMPLES", "KINDS"]

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))
KINDS = {"gloo": "gloo", "example": "unix_socket_pipe:UnixSocketFabric"}
