"""The files of a checkpoint as they were before vLLM loaded it.

A connector is made after the weights were loaded. If a checkpoint was replaced in between, the fingerprint would
describe weights that vLLM does not have. So each worker records the files before it loads them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import wraps
from typing import Any

from kvferry.models.checkpoint import CheckpointFiles

logger = logging.getLogger(__name__)

_files_before_load: dict[tuple[str, str], CheckpointFiles] = {}
"""The recorded files, by model and revision."""


def watch_loads() -> None:
    """Have each worker of this process record the files when it initializes its device, which is before it loads the
    model. vLLM has no hook for connectors at these times."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    initialize = WorkerWrapperBase.init_device
    if hasattr(initialize, "__wrapped__"):
        return

    @wraps(initialize)
    def watched(self: Any) -> None:
        if self.vllm_config.kv_transfer_config is not None:
            record_files(self.vllm_config.model_config)
        initialize(self)

    WorkerWrapperBase.init_device = watched


def record_files(model: Any) -> None:
    """Record the files of a model, given vLLM's configuration of it. Files that cannot be read are reported when the
    fingerprint is computed."""
    with suppress(OSError):
        _files_before_load[_key(model)] = CheckpointFiles.of(model.model, model.revision)


def before_loading(model: Any) -> CheckpointFiles | None:
    """The files before the model was loaded; None if they were not recorded, which is logged."""
    before = _files_before_load.get(_key(model))
    if before is None:
        logger.info("whether the files of %s changed while vLLM loaded them is not known", model.model)
    return before


def _key(model: Any) -> tuple[str, str]:
    return str(model.model), str(model.revision)
