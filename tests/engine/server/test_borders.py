"""The server imports without torch and transformers."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None
import kvferry.engine.server.app
"""


def test_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
