"""The borders that import-linter cannot see: what happens when the package is really imported without torch."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "kvferry",
    "kvferry.api.decoding",
    "kvferry.core.block_hash",
    "kvferry.core.request",
    "kvferry.core.transfer_config",
    "kvferry.http.client",
    "kvferry.http.server",
    "kvferry.observe.metrics",
    "kvferry.connectors.api",
    "kvferry.connectors.registry",
    "kvferry.connectors.p2p.scheduler",
    "kvferry.connectors.shared_storage.scheduler",
    "kvferry.transport.lookup_buffer.table",
    "kvferry.transport.pipe.meeting",
    "kvferry.transport.pipe.table",
    "kvferry.engine.block_pool",
    "kvferry.engine.config",
    "kvferry.engine.scheduler",
    "kvferry.engine.sequence",
    "kvferry.engine.server.http_server",
    "kvferry.models.catalog",
    "kvferry.router.app",
    "kvferry.fleet.local",
    "kvferry.cli.main",
]

BLOCK_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_with_torch_blocked(module: str) -> None:
    code = f"{BLOCK_TORCH}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
