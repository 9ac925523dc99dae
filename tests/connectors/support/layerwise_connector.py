"""The cache connector, which loads layer by layer wherever it may choose."""

from __future__ import annotations

from dataclasses import replace

from kvferry.connectors.kv_store.load_policy import LoadPolicy
from kvferry.connectors.kv_store.scheduler import KVStoreSchedulerSide
from kvferry.connectors.registry import KV_STORE


class LayerwisePolicy(LoadPolicy):
    def prefers_layerwise(self, *arguments: object, **options: object) -> bool:
        return True


class LayerwiseSchedulerSide(KVStoreSchedulerSide):
    policy_type = LayerwisePolicy


LayerwiseConnector = replace(KV_STORE, scheduler_side=f"{__name__}:LayerwiseSchedulerSide")
