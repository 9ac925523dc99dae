"""With this folder first on PYTHONPATH, vLLM's processes sleep where they would otherwise yield the processor in a
loop. kvferry starts vLLM's servers for CPUs so.

Two of their threads do so during a hand-off: a worker that waits for its engine's next message, and NIXL's progress
thread, for which NIXL's Python API has no setting. On Linux 6.18, a thread that yields in a loop can starve the other
threads of its core for good: of two vLLM servers with NixlConnector and one core each, one does not answer the other
before its lease ends. On a machine whose load far exceeds its cores, servers do not start in time. If a server has free
cores, a message to a worker may arrive 50 µs later.

The `sitecustomize` that Python would have found without this folder is run as well.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

DELAY_US = 200
WAIT_S = 50e-6


def _sleep() -> None:
    time.sleep(WAIT_S)


class _Finder(MetaPathFinder):
    """Finds `nixl_cu12._api` as usual, and changes it once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "nixl_cu12._api":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        make_agent = module.nixlBind.nixlAgent

        def with_delay(name: str, config: Any) -> Any:
            config.pthrDelay = DELAY_US
            return make_agent(name, config)

        module.nixlBind.nixlAgent = with_delay


def _run_next() -> None:
    own_folder = Path(__file__).resolve().parent
    spec = PathFinder.find_spec(__name__, [folder for folder in sys.path if Path(folder).resolve() != own_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


os.sched_yield = _sleep
sys.meta_path.insert(0, _Finder())
if __name__ == "sitecustomize":
    _run_next()
