"""The page of a running fleet in a real browser: requests through P and D, an instance that is killed, and a chat."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.browser import chromium, require_chromium
from support.processes import cluster, kvferry

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
        tab.wait("return state.verdict.startsWith('D')", timeout_s=60)
        tab.run("document.querySelector('#tab-requests').click()")
        tab.wait("return document.querySelectorAll('#rows tr').length >= 20")
        assert "prefill-0 → decode-" in tab.text("#rows")
        tab.run("document.querySelector('#tab-chat').click(); document.querySelector('#plain').click()")
        tab.run("document.querySelector('#prompt').value = 'a'; document.querySelector('#whole').click()")
        tab.run("document.querySelector('#ask').requestSubmit()")
        tab.wait("return document.querySelector('#log').innerText.includes('(client)')", timeout_s=30)
        tab.run("document.querySelector('#tab-fleet').click()")
        os.kill(started.decode[1].pid, signal.SIGKILL)
        tab.wait("return document.querySelector('#events').innerText.includes('decode-1 is down')", timeout_s=30)
        assert tab.log() == []


def test_an_instance_of_its_own_shows_its_load_and_a_chat(model_maker: Any, tmp_path: Path) -> None:
    require_chromium()
    store = f'{{"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {{"store": "file:{tmp_path}/kv"}}}}'
    arguments = ("serve", str(model_maker("llama")), "--prefill", "0", "--kv-transfer-config", store)
    with kvferry(*arguments, log=tmp_path / "log") as instance, chromium(tmp_path / "profile") as tab:
        tab.resize(360, 800)
        tab.open(instance.url + "/")
        tab.wait("return document.querySelector('#list-d b')?.innerText === 'this instance'")
        for number in range(6):
            body = {"prompt": [number + 3] * 60, "max_tokens": 8, "ignore_eos": True, "return_timeline": True}
            answer = instance.post("/v1/completions", body).json()
            assert 0 < answer["timeline_ms"]["first_token"] <= answer["timeline_ms"]["done"]
        tab.wait("return state.points.some((point) => point.ttft_p50 > 0 && point.requests > 0)")
        tab.wait("return document.querySelector('#list-d').innerText.includes('tier 0')")
        assert tab.run("return document.querySelector('#tab-requests').hidden")
        assert tab.run("return document.documentElement.scrollWidth") <= 360
        tab.run("document.querySelector('#tab-chat').click(); document.querySelector('#plain').click()")
        tab.run("document.querySelector('#prompt').value = 'a'; document.querySelector('#ask').requestSubmit()")
        tab.wait("return document.querySelector('#log').innerText.includes('TTFT')", timeout_s=30)
        assert tab.log() == []


def test_no_page_where_none_is_wanted(model_maker: Any, tmp_path: Path) -> None:
    arguments = ("serve", str(model_maker("llama")), "--prefill", "0", "--no-page")
    with kvferry(*arguments, log=tmp_path / "log") as instance:
        assert instance.get("/").status_code == 404
