"""Latent attention (MLA), which vLLM's plain kernels for CPUs compute differently behind cached KV."""

from __future__ import annotations

import pytest

from adapters.conftest import ModelMaker, connector
from support.vllm_process import VllmFailed, VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]


def test_it_is_refused_at_start(make_model: ModelMaker) -> None:
    import torch

    if torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM has other kernels for AMX")
    process = VllmProcess(make_model("deepseek_v2"), connector("KvferryP2pConnector"))
    try:
        with pytest.raises(VllmFailed, match=r"latent attention \(MLA\) computes other values"):
            process.ready()
    finally:
        process.close()
