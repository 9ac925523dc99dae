"""Each instance's own `--kv-transfer-config`, made from the one for all."""

from __future__ import annotations

import json

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.fleet.spec.kv_transfer import (
    DEFAULT,
    check_transfer,
    hand_off_role,
    kv_role,
    require_registrable,
    transfer_for,
    transfer_for_member,
)


@pytest.mark.parametrize(
    ("role", "expected"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")]
)
def test_each_role_has_its_kv_role(role: str, expected: str) -> None:
    assert kv_role(role) == expected  # type: ignore[arg-type]
    assert json.loads(transfer_for(DEFAULT, role))["kv_role"] == expected  # type: ignore[arg-type]


def test_a_role_that_is_set_stays_unless_it_is_the_other_one() -> None:
    both = '{"kv_connector":"P2pConnector","kv_role":"kv_both"}'
    assert json.loads(transfer_for(both, "prefill"))["kv_role"] == "kv_both"
    consumer = '{"kv_connector":"P2pConnector","kv_role":"kv_consumer"}'
    with pytest.raises(ConfigError, match="a prefill instance cannot have kv_role kv_consumer"):
        transfer_for(consumer, "prefill")
    assert json.loads(transfer_for(consumer, "both"))["kv_role"] == "kv_consumer"


def test_members_of_one_machine_differ_in_what_must_differ() -> None:
    text = '{"kv_connector":"P2pConnector","engine_id":"e","kv_port":5000}'
    own = json.loads(transfer_for_member(text, "decode", "decode-1", 1))
    assert (own["engine_id"], own["kv_port"]) == ("e-decode-1", 5001)
    assert "kv_ip" not in own
    assert json.loads(transfer_for_member(DEFAULT, "decode", "d", 3, node="10.0.0.7"))["kv_ip"] == "10.0.0.7"
    named = '{"kv_connector":"P2pConnector","kv_ip":"10.0.0.1"}'
    assert json.loads(transfer_for_member(named, "decode", "d", 0, node="10.0.0.7"))["kv_ip"] == "10.0.0.1"


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_port"):
        transfer_for_member('{"kv_connector":"P2pConnector","kv_port":65535}', "decode", "d", 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kv_connector":"P2pConector"}'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        check_transfer(text)


def test_an_instance_registers_for_what_its_connector_can_do() -> None:
    consumer = parse_transfer_config('{"kv_connector":"P2pConnector","kv_role":"kv_consumer"}')
    assert hand_off_role(consumer) == "kv_consumer"
    require_registrable(consumer, "decode")
    with pytest.raises(ConfigError, match=r"registers for prefill, but .* kv_role kv_consumer.*`kvferry decode`"):
        require_registrable(consumer, "prefill")
