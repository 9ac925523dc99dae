"""Schemathesis against a server: requests made from its OpenAPI document, and answers held against it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance"),
]


def require_conforming(url: str, folder: Path, *, examples: int, phases: str, seed: int = 1) -> None:
    """Run `schemathesis` from `folder`, where it leaves its files; fail with its report. The coverage phase has one
    thread: hypothesis parses sources in it, which fails at times in several threads of Python 3.11."""
    num_threads = 1 if "coverage" in phases else 4
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json"),
        *(f"--checks={','.join(CHECKS)}", f"--phases={phases}", "--suppress-health-check=all"),
        *(f"--max-examples={examples}", f"--seed={seed}", "--generation-database=none", "--no-color"),
        *("--continue-on-failure", "--request-timeout=60", "--warnings=off", f"--workers={num_threads}"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
