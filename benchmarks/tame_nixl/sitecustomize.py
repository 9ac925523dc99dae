"""Put first on PYTHONPATH, this lets NIXL's progress thread sleep between two looks, which its Python API has no way to
say. For `vllm_handoff.py`, as a second form of vLLM's NixlConnector; nothing else uses it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

DELAY_US = 200


class _Finder(MetaPathFinder):
    """Finds `nixl_cu12._api` as ever, and has it changed once it is loaded."""

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


sys.meta_path.insert(0, _Finder())
