"""What kvferry's connectors of one vLLM must settle among themselves, when vLLM's MultiConnector has several.

Owns the lists of them, by engine, in this process.
"""

from __future__ import annotations

from kvferry.adapters.vllm.idle import IdlePause, PauseUser
from kvferry.adapters.vllm.messages import WorkerFacts
from kvferry.adapters.vllm.settings import AdapterSettings
from kvferry.core.errors import ConfigError

_hand_offs: dict[str, object] = {}
_allocations: dict[str, object] = {}
_workers: dict[str, dict[str, WorkerFacts]] = {}
_pauses: dict[str, IdlePause] = {}


def claim_hand_offs(connector: object, settings: AdapterSettings) -> None:
    """Only one may write tickets: vLLM cannot join two. Raises `ConfigError` when another one does already."""
    if not settings.options.hand_off:
        return
    other = _hand_offs.setdefault(settings.transfer.engine_id, connector)
    if other is not connector:
        raise ConfigError(
            f"{type(other).__name__} and {type(connector).__name__} would both hand requests off; give all but one"
            ' "hand_off": false in its kv_connector_extra_config'
        )


def claims_allocation(connector: object, settings: AdapterSettings) -> bool:
    """Whether this one says where the KV cache lies: the first that asks."""
    return _allocations.setdefault(settings.transfer.engine_id, connector) is connector


def add_worker(settings: AdapterSettings, facts: WorkerFacts) -> None:
    """A worker half is ready."""
    _workers.setdefault(settings.transfer.engine_id, {})[settings.key] = facts


def worker_facts(settings: AdapterSettings) -> dict[str, WorkerFacts]:
    """Of all worker halves of this engine here, by `AdapterSettings.key`."""
    return dict(_workers.get(settings.transfer.engine_id, {}))


def pause_user(settings: AdapterSettings, longest_s: float) -> PauseUser:
    """What a scheduler half tells of its steps."""
    return _pauses.setdefault(settings.transfer.engine_id, IdlePause(longest_s)).user(settings.key)


def forget(connector: object, settings: AdapterSettings) -> None:
    """It is closed."""
    engine_id = settings.transfer.engine_id
    for claims in (_hand_offs, _allocations):
        if claims.get(engine_id) is connector:
            del claims[engine_id]
    _workers.pop(engine_id, None)
    _pauses.pop(engine_id, None)
