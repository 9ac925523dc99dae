"""Lets SGLang's servers run on a machine without an accelerator. `scripts/install_sglang_cpu.sh` copies this file into
an environment of SGLang's, where a `.pth` file imports it in each Python process; kvferry itself never imports it.

SGLang 0.5.23 has an engine for CPUs, but needs two things that its wheel takes for granted:

- modules without a build for CPUs on PyPI (`STAND_INS`), which are imported at start. They are replaced by modules
  whose attributes do nothing. `--attention-backend torch_native --sampling-backend pytorch` choose torch's own
  attention and sampling, so that nothing of these modules is called.
- pinned memory and CUDA events in the sender of Mooncake's transfers. SGLang has another way for senders without
  `supports_host_tensor_indices`, which copies at once; it is taken here.

`SGLANG_EXTERNAL_MODEL_PACKAGE` is set to a package beside this file that names Llama only, because importing all of
SGLang's models takes most of a start; the others are imported when one of them is served.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STAND_INS = ("sgl_kernel", "torchvision", "torchaudio")
SENDER = "sglang.srt.disaggregation.mooncake.conn"


class _Attribute(type):
    """An attribute of a stand-in: a class that can be inherited from, called and iterated, and has any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _StandIn(ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(name, (), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last of the finders: a package that is installed is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] not in STAND_INS or _is_only_asked_for():
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _is_only_asked_for() -> bool:
    """Called by `importlib.util.find_spec`, with which transformers looks which packages there are."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_filename == importlib.util.__file__:
            return True
        frame = frame.f_back
    return False


class _SenderFinder(importlib.abc.MetaPathFinder):
    """Changes one attribute of SGLang's module `SENDER` when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != SENDER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                module.MooncakeKVSender.supports_host_tensor_indices = False

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _set_start_method(method: str | None, force: bool = False) -> None:
    _START(None if method is None else "fork", force)


_START = multiprocessing.set_start_method
multiprocessing.set_start_method = _set_start_method
sys.meta_path.insert(0, _SenderFinder())
sys.meta_path.append(_StandInFinder())
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang_on_cpu_models")
