"""What can be known to be wrong before anything is started or loaded, each told in one line."""

from __future__ import annotations

from kvferry.engine.config import EngineConfig
from kvferry.fleet.listening import require_free
from kvferry.fleet.local import LOOPBACK
from kvferry.fleet.spec import EngineChoice, FleetSpec, Listen
from kvferry.http.config import HttpAccess
from kvferry.models.catalog import resolve
from kvferry.models.hub import require_on_hub


def check_before_start(
    engine: EngineConfig, choice: EngineChoice, listen: Listen, access: HttpAccess, fleet: FleetSpec | None = None
) -> None:
    """Raises `ConfigError`. Whoever starts under a supervisor need not: the supervisor has asked."""
    access.check_files()
    require_free(listen.host, listen.port)
    if fleet is not None and fleet.instance_ports is not None:
        for index in range(fleet.num_prefill + fleet.num_decode):
            require_free(LOOPBACK, fleet.instance_port(index), "--instance-ports")
    if choice.engine == "kvferry":
        source = resolve(engine.model)
        if isinstance(source, str):
            require_on_hub(source)
