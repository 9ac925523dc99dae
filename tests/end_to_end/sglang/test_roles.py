"""A fleet has SGLang's servers change their roles while it serves, with POST /pd_role_switch."""

from __future__ import annotations

import pytest

from support.sglang_servers import Asking, SglangFleet

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(900)]


def test_a_server_changes_its_role_without_a_restart_and_no_answer_is_wrong(fleet: SglangFleet) -> None:
    fleet.until_ready(2, 2)
    pids = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
    with Asking(fleet.status.url) as asking:
        fleet.becomes(1, 3)
        asking.more(20)
        assert {name: fleet.pid(name) for name in fleet.names("prefill", "decode")} == pids
        fleet.becomes(2, 2)  # the one that has changed is replaced
        asking.more(20)
    assert asking.wrong == []
    left = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
    assert len(left.items() & pids.items()) == 3
