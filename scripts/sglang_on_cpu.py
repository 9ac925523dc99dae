"""Lets SGLang's servers run on a machine without an accelerator. `scripts/install_sglang_cpu.sh` copies this file into
an environment of SGLang's, where a `.pth` file imports it in each Python process; kvferry itself never imports it.

SGLang 0.5.23 has an engine for CPUs, but needs two things that its wheel takes for granted:

- modules without a build for CPUs on PyPI (`STAND_INS`), which are imported at start. They are replaced by modules
  whose attributes do nothing (`stand_ins.py`). `--attention-backend torch_native --sampling-backend pytorch` choose
  torch's own attention and sampling, so that nothing of these modules is called.
- pinned memory and CUDA events in the sender of Mooncake's transfers. SGLang has another way for senders without
  `supports_host_tensor_indices`, which copies at once; it is taken here.

`SGLANG_EXTERNAL_MODEL_PACKAGE` is set to a package beside this file that names Llama only, because importing all of
SGLang's models takes most of a start; the others are imported when one of them is served.
"""

from __future__ import annotations

import importlib.abc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from stand_ins import stand_in

STAND_INS = ("sgl_kernel", "torchvision", "torchaudio")
SENDER = "sglang.srt.disaggregation.mooncake.conn"


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
stand_in(STAND_INS)
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang_on_cpu_models")
