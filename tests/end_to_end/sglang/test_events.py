"""KV events of SGLang's prefill servers tell a router which of them has a prompt's prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sglang_servers import SglangFleet, figure, post, router_before
from support.waiting import until

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.timeout(600)]


def test_a_new_router_sends_a_prompt_where_its_prefix_is(fleet: SglangFleet, tmp_path: Path) -> None:
    prompt = [7 + (place * 31) % 3000 for place in range(200)]
    prefills = fleet.urls("prefill")
    before = [figure(url, "sglang:num_requests_total") for url in prefills]
    assert post(fleet.status.url, {"prompt": prompt}).status_code == 200
    until(lambda: sum(figure(url, "sglang:num_requests_total") for url in prefills) > sum(before), 30)
    [holder] = [
        url for url, num in zip(prefills, before, strict=True) if figure(url, "sglang:num_requests_total") > num
    ]
    until(lambda: figure(fleet.status.url, "kvferry_router_kv_events_total", role="prefill") > 0, 30)

    flags = ("--policy=prefix", "--disaggregate-from=0")
    with router_before(tmp_path / "router.log", prefills, fleet.urls("decode"), *flags) as router:
        until(lambda: figure(router.url, "kvferry_router_kv_events_total", role="prefill") > 0, 30)  # replayed
        num_before = figure(holder, "sglang:num_requests_total")
        for number in range(6):
            assert post(router.url, {"prompt": [*prompt, 5 + number]}).status_code == 200
        until(lambda: figure(holder, "sglang:num_requests_total") == num_before + 6, 30)
