"""The borders that import-linter cannot see: what happens when the package is really imported without torch."""

import re
import subprocess
import sys
from pathlib import Path

import kvferry

SOURCE = Path(kvferry.__file__).parent

TORCH_FREE = [
    "kvferry",
    "kvferry.api.decoding",
    "kvferry.core.blocks.block_hash",
    "kvferry.core.request",
    "kvferry.core.settings.transfer_config",
    "kvferry.http.client.http_client",
    "kvferry.http.server.http_server",
    "kvferry.observe.metrics",
    "kvferry.connectors.api",
    "kvferry.connectors.caching",
    "kvferry.connectors.registry",
    "kvferry.connectors.p2p.scheduler",
    "kvferry.connectors.kv_store.scheduler",
    "kvferry.transport.lookup_buffer.base",
    "kvferry.transport.fabric.base",
    "kvferry.store.eviction.reuse",
    "kvferry.store.trace.comparison",
    "kvferry.engine.blocks.block_pool",
    "kvferry.engine.config",
    "kvferry.engine.core",
    "kvferry.engine.patch_names",
    "kvferry.engine.scheduling.scheduler",
    "kvferry.engine.statistics",
    "kvferry.engine.scheduling.sequence",
    "kvferry.engine.stepped",
    "kvferry.engine.server.app",
    "kvferry.models.catalog",
    "kvferry.router.app",
    "kvferry.fleet.processes.recipe",
    "kvferry.sim.fleet",
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


IMPORT_ALL = """
import importlib, traceback
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        traceback.print_exc()
        print(name)
"""


def test_imports_with_torch_blocked() -> None:
    """In one process: what one of them has imported it has imported without torch."""
    command = [sys.executable, "-c", BLOCK_TORCH + IMPORT_ALL, *TORCH_FREE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


SHARED_MEMORY_HAND_OFF = """
import sys
import kvferry.connectors.p2p.scheduler, kvferry.connectors.p2p.worker
import kvferry.transport.fabric.shm, kvferry.transport.lookup_buffer.fabric
print(*(name for name in sys.modules if name.startswith("kvferry.transport")))
"""


def test_a_hand_off_over_shared_memory_loads_no_other_medium() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED_MEMORY_HAND_OFF], check=True, capture_output=True, text=True)
    loaded = {name.removeprefix("kvferry.transport").removeprefix(".") for name in done.stdout.split()}
    assert {"fabric.shm", "lookup_buffer.fabric"} <= loaded
    others = {"tls", "checksum", "memory_vector", "cuda", "fabric.pipe", "fabric.tcp", "fabric.nixl", "fabric.mooncake"}
    assert not loaded & others


def test_one_module_asks_how_much_the_machine_has() -> None:
    """A container is allowed less than the machine has, which only `core.host` knows."""
    questions = re.compile(r"virtual_memory\(|swap_memory\(|sched_getaffinity\(|cpu_count\(|available_parallelism\(")
    asking = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if questions.search(path.read_text())}
    assert asking == {"core/host/machine.py"}
