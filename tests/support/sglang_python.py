"""Where SGLang's environment is."""

from __future__ import annotations

import os
from pathlib import Path

PYTHON = Path(__file__).parents[2] / os.environ.get("VENV_SGLANG", ".venv-sglang") / "bin" / "python"
