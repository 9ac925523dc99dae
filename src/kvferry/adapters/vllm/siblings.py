"""The agreements between several connectors in one vLLM (in vLLM's MultiConnector). Owns this process's registry of
them, by engine id.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.adapters.vllm.identity.salts import Salts
from kvferry.adapters.vllm.idle import ConnectorPause, IdlePause
from kvferry.adapters.vllm.settings import AdapterSettings
from kvferry.connectors.caching import keeps_blocks
from kvferry.connectors.registry import VLLM_HAND_OFF_CONNECTORS, find_connector
from kvferry.core.errors import ConfigError

_hand_offs: dict[str, object] = {}
_allocations: dict[str, object] = {}
_pauses: dict[str, IdlePause] = {}
_salts: dict[str, Salts] = {}


def claim_hand_offs(connector: object, settings: AdapterSettings) -> None:
    """Claim the right to make tickets. Only one connector may have it, because vLLM cannot join two tickets. Raises
    `ConfigError` if another connector has it."""
    if not settings.options.hand_off:
        return
    other = _hand_offs.setdefault(settings.transfer.engine_id, connector)
    if other is not connector:
        raise ConfigError(
            f"{type(other).__name__} and {type(connector).__name__} would both hand requests off; give all but one"
            ' "hand_off": false in its kv_connector_extra_config'
        )


def hands_off(connector: object, settings: AdapterSettings, others: Iterable[object]) -> bool:
    """True if this connector makes tickets: a cache of kvferry's does not if one of vLLM's connectors beside it does.
    Raises `ConfigError` if neither is a cache."""
    vllm_connector = next(
        (type(other).__name__ for other in others if type(other).__name__ in VLLM_HAND_OFF_CONNECTORS), None
    )
    if vllm_connector is None or not settings.options.hand_off:
        return settings.options.hand_off
    if not keeps_blocks(find_connector(settings.transfer)):
        raise ConfigError(f"{vllm_connector} and {type(connector).__name__} would both hand requests off; remove one")
    return False


def claims_allocation(connector: object, settings: AdapterSettings) -> bool:
    """True if this connector provides the memory of the KV cache. The first connector that calls this does."""
    return _allocations.setdefault(settings.transfer.engine_id, connector) is connector


def idle_pause(settings: AdapterSettings, *, pauses: bool) -> ConnectorPause:
    """The share of a scheduler half in the engine's pause. `pauses` False: the engine has no pauses."""
    pause = IdlePause() if pauses else IdlePause(max_s=0.0)
    return _pauses.setdefault(settings.transfer.engine_id, pause).user(settings.key)


def salts(settings: AdapterSettings, lora_config: object) -> Salts:
    """The salts of this engine's requests."""
    return _salts.setdefault(settings.transfer.engine_id, Salts(lora_config))


def forget(connector: object, settings: AdapterSettings) -> None:
    """Release the claims of a closed connector."""
    engine_id = settings.transfer.engine_id
    for claims in (_hand_offs, _allocations):
        if claims.get(engine_id) is connector:
            del claims[engine_id]
    _pauses.pop(engine_id, None)
    _salts.pop(engine_id, None)
