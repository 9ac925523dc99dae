"""The page of a running fleet in a real browser: requests through P and D, an instance that is killed, and a chat."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.browser import chromium, require_chromium
from support.processes import cluster

pytestmark = [pytest.mark.processes]


def test_a_fleet_under_load_and_an_instance_that_is_killed(model_maker: Any, tmp_path: Path) -> None:
    require_chromium()
    with (
        cluster(model_maker("llama"), tmp_path, num_decode=2, ends_cleanly=False) as started,
        chromium(tmp_path / "profile") as tab,
    ):
        tab.open(started.router.url + "/")
        tab.wait("return document.querySelectorAll('#list-d b').length === 2")
        for number in range(20):
            body = {"prompt": [number + 3] * 60, "max_tokens": 8, "stream": True, "ignore_eos": True}
            assert started.router.post("/v1/completions", body).status_code == 200
        tab.wait("return /P|queue/.test(document.querySelector('#plot-waits svg').getAttribute('aria-label'))")
        tab.wait("return state.points.some((point) => point.ttft_p50 > 0)")
        tab.wait("return state.points.some((point) => point.hand_off_bytes > 0)")
        tab.wait("return state.verdict.startsWith('D')", within_s=60)
        tab.run("document.querySelector('#tab-requests').click()")
        tab.wait("return document.querySelectorAll('#rows tr').length >= 20")
        assert "prefill-0 → decode-" in tab.text("#rows")
        tab.run("document.querySelector('#tab-chat').click(); document.querySelector('#plain').click()")
        tab.run("document.querySelector('#prompt').value = 'a'; document.querySelector('#whole').click()")
        tab.run("document.querySelector('#ask').requestSubmit()")
        tab.wait("return document.querySelector('#log').innerText.includes('(client)')", within_s=30)
        tab.run("document.querySelector('#tab-fleet').click()")
        os.kill(started.decode[1].pid, signal.SIGKILL)
        tab.wait("return document.querySelector('#events').innerText.includes('decode-1 is down')", within_s=30)
        assert tab.log() == []
