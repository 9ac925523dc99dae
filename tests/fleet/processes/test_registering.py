"""Programs of somebody else's are registered at routers by the backend that started them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from fleet.fleets import up
from fleet.processes.test_external_servers import foreign, program_of
from fleet.processes.test_recipe import recipe
from fleet.recording import RecordingDisplay
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.recipe import TOKEN_VARIABLE
from kvferry.fleet.spec.settings import FleetShapeSettings, InstanceSettings
from kvferry.http.registrar import make_registrar
from kvferry.http.server.config import HttpConfig
from router.peers import SECRET, routing
from support.waiting import eventually

TOKEN = SECRET
HTTP = HttpConfig(shutdown_grace_s=1, secret=TOKEN)
SETTINGS: dict[str, Any] = {"registration": True, "protocol": "nixl", "health_interval_s": 0.05}
"""The program answers anything: with this protocol it is not asked what it is."""


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


async def test_it_is_there_while_it_serves_and_takes_its_leave() -> None:
    display, spec = RecordingDisplay(), foreign()
    async with routing([], [], HTTP, registration_lease_s=1.0, **SETTINGS) as (router, url):
        registrar = make_registrar((url,), "prefill", host="127.0.0.1", bootstrap_port=7)
        task = await up(display, {"both": lambda name: replace(spec, registrar=registrar)})
        await eventually(lambda: [one.role for one in router.services.pools] == ["prefill"])
        (instance,) = router.services.pools
        assert spec.foreign is not None
        assert (instance.url, instance.address.bootstrap_port) == (spec.foreign.url, 7)

        program = program_of(spec)
        program.send_signal(signal.SIGSTOP)  # it stands still, though its controller does not
        await eventually(lambda: not [one for one in router.services.pools if not one.draining])
        program.send_signal(signal.SIGCONT)
        await eventually(lambda: bool([one for one in router.services.pools if not one.draining]))

        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
        assert not [one for one in router.services.pools if not one.draining]
        await eventually(lambda: not list(router.services.pools))


async def test_a_router_that_is_not_there_keeps_nothing_from_ending() -> None:
    display = RecordingDisplay()
    registrar = make_registrar(("http://127.0.0.1:9",), "decode", host="127.0.0.1")
    task = await up(display, {"both": lambda name: replace(foreign(), registrar=registrar)})
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await task == 0


@pytest.mark.parametrize(
    ("instance", "token", "complaint"),
    [
        ({"register": ("http://127.0.0.1:9",)}, "", "KVFERRY_AUTH_TOKEN"),
        ({"register": ("nowhere",)}, TOKEN, "--register"),
        ({"register": ("http://127.0.0.1:9",), "advertise_url": "http://a:1"}, TOKEN, "--advertise-url"),
    ],
)
def test_settings_of_a_fleet(instance: dict[str, Any], token: str, complaint: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=complaint):
        recipe(
            spec=FleetShapeSettings(prefill=1),
            engine=EngineConfig(model="kvferry/tiny-python"),
            instance=InstanceSettings(**instance),
        )
