"""Answers of prefill and decode servers behind kvferry's router are those of one SGLang server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import KvferryProcess
from support.sglang_servers import SglangFleet, answers, cases, differences, figure, require_idle, router_before

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.timeout(900)]


def test_requests_of_all_kinds_are_answered_as_by_one_server(fleet: SglangFleet, plain: KvferryProcess) -> None:
    asked = cases(320)
    before = figure(fleet.status.url, "kvferry_router_hand_offs_total", kind="concurrent")
    found = answers(fleet.status.url, asked)
    assert differences(asked, answers(plain.url, asked), found) == []
    assert figure(fleet.status.url, "kvferry_router_hand_offs_total", kind="concurrent") - before == len(asked)
    servers = fleet.urls("prefill") + fleet.urls("decode")
    assert all(figure(url, "sglang:num_requests_total") > 0 for url in servers)
    require_idle(*servers)


def test_one_pair_is_enough(fleet: SglangFleet, plain: KvferryProcess, tmp_path: Path) -> None:
    asked = cases(64, seed=2)
    prefill, decode = fleet.urls("prefill")[:1], fleet.urls("decode")[:1]
    with router_before(tmp_path / "router.log", prefill, decode) as router:
        found = answers(router.url, asked)
    assert differences(asked, answers(plain.url, asked), found) == []
