"""kvferry's connectors inside vLLM.

For every connector in the registry, this module has a class for vLLM, named `Kvferry` and the connector's name. It is
made when it is first used. `--kv-transfer-config` finds the class by its name alone, because `register` (vLLM's plugin
entry point) registers all names, or with `"kv_connector_module_path": "kvferry.adapters.vllm"`. Importing this module
imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from kvferry.adapters.vllm.catalog import PREFIX, class_names, connector_class
from kvferry.adapters.vllm.dynamo import add_to_dynamo
from kvferry.adapters.vllm.identity.loaded_files import watch_loads
from kvferry.core.errors import UnknownName

__all__ = ["class_names", "register"]


def register() -> None:
    """Register all names with vLLM's connector factory, and log as vLLM does. vLLM calls this in each of its processes,
    perhaps more than once."""
    _log_as_vllm()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in class_names():
        with suppress(ValueError):  # registered already
            KVConnectorFactory.register_connector(name, __name__, name)
    add_to_dynamo(class_names())
    if "vllm.v1.worker.worker_base" in sys.modules:  # in a worker, which is about to load its model
        watch_loads()


def _log_as_vllm() -> None:
    """Log to vLLM's handlers, at vLLM's level, unless the logger `kvferry` has its own configuration."""
    own_logger, vllm_logger = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if vllm_logger.handlers and not own_logger.handlers and not own_logger.level:
        own_logger.parent = vllm_logger
        own_logger.setLevel(logging.NOTSET)  # clears the cached levels


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    watch_loads()  # for workers in the process that reads the configuration
    try:
        return connector_class(name)
    except UnknownName as error:
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return [*__all__, *class_names()]
