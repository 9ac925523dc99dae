"""Counts are recommended to an autoscaler: by real routers, at which instances have registered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.control.test_desired_counts import SCALE, Traffic
from kvferry.cli.main import main
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.core.settings.toml_file import to_toml
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.recommender import REGISTERS_S, Recommender, read_recommended
from kvferry.fleet.control.router_client import RouterClient
from kvferry.fleet.spec.spec_file import SpecFile
from kvferry.router.app import Router
from router.instances.test_registrations import HTTP, SOON, a_decode, a_prefill, registering, registrar
from router.peers import SECRET, instances, routing
from support.waiting import eventually

ROLES = {"prefill": {"count": 2, "min": 1, "max": 6}, "decode": {"count": 2, "min": 1, "max": 6}}


class RecordingRouterClient(RouterClient):
    """Real but for what routers measure, which a test says."""

    def __init__(self) -> None:
        super().__init__(SECRET)
        self.reported: Any = lambda: None

    async def traffic(self, router: str, seconds: float, most: int) -> TrafficReport | None:
        return self.reported()


def spec(folder: Path, **more: Any) -> Path:
    path = folder / "chat.toml"
    told: dict[str, Any] = {"name": "chat", "model": "m", "mode": "pooling", "role": ROLES, "scale": SCALE, **more}
    path.write_text(to_toml(told))
    return path


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[list[Router], list[str]]]:
    """One prefill and one decode instance have registered at both."""
    p, d = a_prefill(), a_decode()
    async with (
        asyncio.timeout(60),
        instances(p, d),
        routing([], [], HTTP, **SOON) as (first, one),
        routing([], [], HTTP, **SOON) as (second, other),
        registering(*(registrar(f"{one},{other}", peer) for peer in (p, d))),
    ):
        for router in (first, second):
            await eventually(lambda router=router: sum(one.usable for one in router.services.pools) == 2)
        yield [first, second], [one, other]


def told(routers: list[Router]) -> list[FleetPlan | None]:
    return [router.services.pools.fleet_plan.plan for router in routers]


async def test_all_routers_say_what_the_requests_need(tmp_path: Path) -> None:
    clock, front = ManualClock(1e6), RecordingRouterClient()
    async with two_routers() as (routers, urls), front:
        made = Recommender(
            SpecFile(spec(tmp_path), read_recommended), [*urls, "http://127.0.0.1:9"], Ledger(tmp_path), front, clock
        )
        await made.look()
        assert told(routers) == [None, None], "who has just begun does not know yet who is there"
        clock.advance(REGISTERS_S)
        front.reported = Traffic(12.0)
        for _ in range(40):
            clock.now = max(clock.now, front.reported().now)
            await made.look()
            clock.advance(0.3)
        first, second = told(routers)
        assert first == second
        assert first is not None
        assert first.desired["prefill"] > 2
        assert f'kvferry_fleet_desired_instances{{role="prefill"}} {first.desired["prefill"]}.0' in (
            routers[1].metrics_text().decode()
        )
        assert len(list(routers[0].services.pools)) == 2, "nothing is said about instances"


async def test_one_that_begins_goes_on_from_what_was_told(tmp_path: Path) -> None:
    async with two_routers() as (routers, urls), RecordingRouterClient() as front:
        await front.send_plan(urls[1], FleetPlan({"prefill": 5, "decode": 3}))
        made = Recommender(SpecFile(spec(tmp_path), read_recommended), urls, Ledger(tmp_path), front, ManualClock(1e6))
        await made.look()
        assert [one and one.desired for one in told(routers)] == [{"prefill": 5, "decode": 3}] * 2


@pytest.mark.parametrize("recommend", [True, False])
async def test_one_that_begins_keeps_what_was_decided_before(tmp_path: Path, recommend: bool) -> None:
    """With the same folder, or, on another machine, without it."""
    path = spec(tmp_path, scale={**SCALE, "recommend": recommend})
    clock = ManualClock(1e6)
    async with two_routers() as (routers, urls), RecordingRouterClient() as front:

        async def looks(folder: Path, num_looks: int) -> FleetPlan:
            file = SpecFile(path, read_recommended)
            made = Recommender(file, urls, Ledger(folder), front, clock, registers_s=0)
            for _ in range(num_looks):
                clock.now = max(clock.now, Traffic(12.0)().now)
                await made.look()
                clock.advance(0.3)
            plan = told(routers)[0]
            assert plan is not None
            return plan

        front.reported = Traffic(12.0)
        (tmp_path / "elsewhere").mkdir()
        before = await looks(tmp_path, 20)
        front.reported = lambda: None
        after, elsewhere = [await looks(folder, 5) for folder in (tmp_path, tmp_path / "elsewhere")]
    assert before.decisions
    assert after.decisions == elsewhere.decisions == before.decisions
    if not recommend:
        assert after.desired == elsewhere.desired == before.desired


async def test_a_router_that_does_not_answer_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with RecordingRouterClient() as front:
        file = SpecFile(spec(tmp_path), read_recommended)
        made = Recommender(file, ["http://127.0.0.1:9"], Ledger(tmp_path), front, ManualClock(1e6))
        await made.look()
        await made.look()
    assert caplog.text.count("no router answers") == 1


async def test_a_router_with_another_token_is_none_of_ours(tmp_path: Path) -> None:
    async with two_routers() as (routers, urls), RouterClient("another token of tests") as front:
        made = Recommender(
            SpecFile(spec(tmp_path), read_recommended), urls, Ledger(tmp_path), front, ManualClock(1e6), registers_s=0
        )
        with pytest.raises(ConfigError, match="does not take orders"):
            await made.look()
        assert told(routers) == [None, None]


async def test_a_spec_is_followed_and_a_wrong_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(1e6)
    async with two_routers() as (routers, urls), RecordingRouterClient() as front:
        file = SpecFile(spec(tmp_path), read_recommended)
        made = Recommender(file, urls, Ledger(tmp_path), front, clock, registers_s=0)
        await made.look()
        more = {**ROLES, "decode": {"count": 4, "min": 4, "max": 6}}
        spec(tmp_path, role=more)
        await made.look()
        assert told(routers)[0] is not None
        assert told(routers)[0].desired == {"prefill": 2, "decode": 4}  # type: ignore[union-attr]
        (tmp_path / "chat.toml").write_text("name = 3")
        await made.look()
        assert told(routers)[0].desired == {"prefill": 2, "decode": 4}  # type: ignore[union-attr]
        assert "the previous spec stays in force" in caplog.text


async def test_a_recommendation_only_begins_with_those_that_are_there(tmp_path: Path) -> None:
    async with two_routers() as (routers, urls), RecordingRouterClient() as front:
        path = spec(tmp_path, scale={**SCALE, "recommend": True})
        made = Recommender(
            SpecFile(path, read_recommended), urls, Ledger(tmp_path), front, ManualClock(1e6), registers_s=0
        )
        await made.look()
        await made.look()
        plan = told(routers)[0]
        assert plan is not None
        assert plan.recommends
        assert plan.desired == {"prefill": 1, "decode": 1}


def test_what_cannot_be_recommended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.toml"
    told: dict[str, Any] = {"name": "chat", "model": "m", "mode": "pooling", "role": ROLES}
    path.write_text(to_toml(told))
    with pytest.raises(ConfigError, match=r"no table \[scale\]"):
        SpecFile(path, read_recommended)
    units = {"members": {"prefill": 1, "decode": 1}, "max": 3}
    path.write_text(to_toml({**told, "role": {}, "mode": "replica", "unit": units, "scale": SCALE}))
    with pytest.raises(ConfigError, match="pooling"):
        SpecFile(path, read_recommended)
    assert main(["fleet", "recommend", str(spec(tmp_path)), "--router", "chat:8000"]) == 2
    assert "--router 'chat:8000' must look like http://HOST:PORT" in capsys.readouterr().err


def test_one_recommends_for_a_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path))
    lease = Ledger(tmp_path / "recommended" / "chat").try_acquire()
    assert lease is not None
    assert main(["fleet", "recommend", str(spec(tmp_path)), "--router", "http://127.0.0.1:9"]) == 2
    assert f"process {os.getpid()} recommends for chat on this machine already" in capsys.readouterr().err
    lease.close()
