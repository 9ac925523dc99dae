"""What several connectors of kvferry's in one vLLM (in vLLM's MultiConnector) must agree on.

Owns the registers of them in this process, by engine id.
"""

from __future__ import annotations

from kvferry.adapters.vllm.idle import IdlePause, PauseUser
from kvferry.adapters.vllm.messages import WorkerFacts
from kvferry.adapters.vllm.salts import Salts
from kvferry.adapters.vllm.settings import AdapterSettings
from kvferry.core.errors import ConfigError

_hand_offs: dict[str, object] = {}
_allocations: dict[str, object] = {}
_workers: dict[str, dict[str, WorkerFacts]] = {}
_pauses: dict[str, IdlePause] = {}
_salts: dict[str, Salts] = {}


def claim_hand_offs(connector: object, settings: AdapterSettings) -> None:
    """Claim the right to make tickets, which only one connector may: vLLM cannot join two tickets. Raises `ConfigError`
    if another one has it."""
    if not settings.options.hand_off:
        return
    other = _hand_offs.setdefault(settings.transfer.engine_id, connector)
    if other is not connector:
        raise ConfigError(
            f"{type(other).__name__} and {type(connector).__name__} would both hand requests off; give all but one"
            ' "hand_off": false in its kv_connector_extra_config'
        )


def claims_allocation(connector: object, settings: AdapterSettings) -> bool:
    """Whether this connector provides the memory of the KV cache: the first one that asks."""
    return _allocations.setdefault(settings.transfer.engine_id, connector) is connector


def add_worker(settings: AdapterSettings, facts: WorkerFacts) -> None:
    """Register a worker half that is ready."""
    _workers.setdefault(settings.transfer.engine_id, {})[settings.key] = facts


def worker_facts(settings: AdapterSettings) -> dict[str, WorkerFacts]:
    """The facts of all worker halves of this engine in this process, by `AdapterSettings.key`."""
    return dict(_workers.get(settings.transfer.engine_id, {}))


def pause_user(settings: AdapterSettings, longest_s: float) -> PauseUser:
    """A scheduler half's share of the engine's pause."""
    return _pauses.setdefault(settings.transfer.engine_id, IdlePause(longest_s)).user(settings.key)


def salts(settings: AdapterSettings, lora_config: object) -> Salts:
    """The salts of this engine's requests."""
    return _salts.setdefault(settings.transfer.engine_id, Salts(lora_config))


def forget(connector: object, settings: AdapterSettings) -> None:
    """A connector was closed."""
    engine_id = settings.transfer.engine_id
    for claims in (_hand_offs, _allocations):
        if claims.get(engine_id) is connector:
            del claims[engine_id]
    _workers.pop(engine_id, None)
    _pauses.pop(engine_id, None)
    _salts.pop(engine_id, None)
