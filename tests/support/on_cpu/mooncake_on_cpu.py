"""vLLM's own MooncakeConnector, for `kv_connector_module_path` on a machine without an accelerator.

The one thing that keeps it from running there is that it asks for the number of its accelerator, to bind its threads to
it, which does nothing on CPUs. Its bootstrap server would also listen on all interfaces.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

__all__ = ["MooncakeConnector"]

_Bootstrap = mooncake_connector.MooncakeBootstrapServer

torch.accelerator.current_device_index = lambda: 0
mooncake_connector.MooncakeBootstrapServer = lambda host, port: _Bootstrap("127.0.0.1", port)
