"""Ports for programs that need theirs as an argument."""

from __future__ import annotations

import json
import socket
from itertools import pairwise

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.vllm.ports import SPACING, free_ports, with_event_ports


def test_ports_are_free_apart_and_not_given_out_twice() -> None:
    first, second = free_ports(5), free_ports(5)
    assert len({*first, *second}) == 10
    for port in first:
        with socket.create_server(("127.0.0.1", port)):
            pass
    ordered = sorted([*first, *second])
    assert all(after - before >= SPACING for before, after in pairwise(ordered))


def test_more_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no 100000 free ports on 127"):
        free_ports(100_000)


def test_event_endpoints_get_ports_wherever_a_star_is() -> None:
    value = json.dumps({"endpoint": "tcp://*:*", "replay_endpoint": "tcp://*:*", "topic": "*"})
    for flags in (["--kv-events-config", value], [f"--kv-events-config={value}"]):
        filled = with_event_ports(["--port", "1", *flags, "--other", value], "127.0.0.1")
        assert filled[:2] == ["--port", "1"]
        assert filled[-1] == value, "of no other flag"
        config = json.loads(filled[-3].partition("=")[2] or filled[-3])
        ports = {config[name].rpartition(":")[2] for name in ("endpoint", "replay_endpoint")}
        assert all(port.isdigit() for port in ports)
        assert len(ports) == 2
        assert config["topic"] == "*"


def test_fixed_ports_stay() -> None:
    flags = ["--kv-events-config", '{"endpoint":"tcp://*:5557"}']
    assert with_event_ports(flags, "127.0.0.1") == flags
