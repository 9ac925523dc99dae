"""What `support.warm` imports before it forks: what an instance and a router import, and the tests' usual model."""

from __future__ import annotations

import gc

from kvferry.core.names import without_collections

with without_collections():
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import kvferry.cli.main
    import kvferry.connectors.kv_store
    import kvferry.connectors.p2p
    import kvferry.engine.executor.rank_main
    import kvferry.engine.launch
    import kvferry.router.server  # noqa: F401

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once: a quarter of an instance's start
gc.collect()
gc.freeze()  # so that a collection in a child does not copy what they share
