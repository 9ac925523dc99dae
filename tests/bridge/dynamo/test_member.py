"""A worker of Dynamo's as a member of a fleet: its settings, and the ends of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.bridge.dynamo.member import MemberSettings, published_events, worker_environment
from kvferry.core.errors import ConfigError
from kvferry.core.messages.instance_facts import EventsAddress
from support.processes import is_running
from support.waiting import until

ARGUMENTS = ("prefill", "prefill-0", "127.0.0.1", "8001", "5", "--", "python", "-m", "dynamo.vllm")


def test_a_command_line_is_parsed() -> None:
    settings = MemberSettings.parse(ARGUMENTS)
    assert (settings.role, settings.port, settings.grace_s, settings.command[0]) == ("prefill", 8001, 5.0, "python")
    assert settings.endpoint("ns").path == "ns.prefill.generate"
    assert MemberSettings.parse(("both", *ARGUMENTS[1:])).endpoint("ns").path == "ns.backend.generate"
    for wrong in ((), ARGUMENTS[:6], ARGUMENTS[:5], ("prefill", "p", "h", "x", "5", "--", "python")):
        with pytest.raises(ConfigError, match="expected ROLE"):
            MemberSettings.parse(wrong)


def test_workers_are_found_in_files_unless_the_user_says_otherwise() -> None:
    settings = MemberSettings.parse(ARGUMENTS)
    alone = worker_environment(settings, {}, "/folder")
    assert (alone["DYN_DISCOVERY_BACKEND"], alone["DYN_FILE_KV"]) == ("file", "/folder")
    assert alone["DYN_TCP_RPC_HOST"] == "127.0.0.1"
    told = worker_environment(settings, {"DYN_DISCOVERY_BACKEND": "etcd", "DYN_LOG": "info"}, "/folder")
    assert not {"DYN_FILE_KV", "DYN_REQUEST_PLANE", "DYN_LOG"} & told.keys()
    assert told["DYN_NAMESPACE"].startswith("kvferry-prefill-0-")
    assert told["DYN_NAMESPACE"] != alone["DYN_NAMESPACE"]


def test_kv_events_are_found_in_the_workers_flags() -> None:
    config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    at = EventsAddress(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558")
    assert published_events([f"--kv-events-config={json.dumps(config)}"]) == at
    assert published_events(["--kv-events-config", json.dumps(config)]) == at
    assert published_events(["--kv-events-config", json.dumps({**config, "enable_kv_cache_events": False})]) is None
    assert published_events(["--kv-events-config", "{"]) is None
    assert published_events([]) is None
    with pytest.raises(ConfigError, match="kv-events-config"):
        published_events(["--kv-events-config", json.dumps({"endpoint": "http://x"})])


def test_the_member_ends_as_its_worker_does(tmp_path: Path) -> None:
    """Where Dynamo's runtime is not installed, the member says so, and leaves no worker."""
    script = tmp_path / "worker.py"
    script.write_text(f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    command = [sys.executable, "-m", "kvferry.bridge.dynamo.member", *ARGUMENTS[:6], sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False)
    assert done.returncode == 2
    assert "ai-dynamo-runtime" in done.stderr
    text = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    if text:
        until(lambda: not is_running(int(text)), 10)
