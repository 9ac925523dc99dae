"""Settings of kvferry's connectors are checked before vLLM is started; all else is vLLM's to judge."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from kvferry.adapters.vllm.settings import AdapterOptions
from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.vllm.environment import VllmEnvironment
from kvferry.fleet.processes.vllm.transfer import (
    has_bootstrap_server,
    read_transfer,
    require_usable_connectors,
    transfer_for_member,
)

IN_PROC = {"shared_storage_path": "/proc/x"}
CHILD = {"kv_connector": "KvferryP2pConnector", "kv_connector_extra_config": {"lease": 1}}


@pytest.mark.parametrize(
    ("connector", "extra", "told"),
    [
        ("P2pConnector", {"transport": "shn"}, "did you mean 'shm'"),
        ("KvferryP2pConnector", {"lease": 3}, "did you mean 'lease_s'"),
        ("KvferryP2pConector", {}, "did you mean 'KvferryP2pConnector'"),
        ("SharedStorageConnector", {}, "shared_storage_path"),
        ("P2pConnector", "no object", "must be an object"),
        ("MultiConnector", {"connectors": [{"kv_connector": "P2pConnector"}, CHILD]}, "lease_s"),
    ],
)
def test_what_is_wrong_is_told(connector: str, extra: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_transfer(json.dumps({"kv_connector": connector, "kv_connector_extra_config": extra}))


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("P2pConnector", {"kv_ip": "10.0.0.1", "hand_off": False, "streams": 4}),
        ("KvferryP2pConnector", {"mix_kernels": True, "shared_memory": False, "model_fingerprint": "a"}),
        ("KvferryNixlConnector", {"backends": ["UCX"]}),
        ("NixlConnector", {"anything": "is vLLM's"}),
        ("KvferrySomebodyElsesConnector", {"its": "own"}),
    ],
)
def test_what_is_not_ours_to_judge_passes(connector: str, extra: dict[str, Any]) -> None:
    found = read_transfer(json.dumps({"kv_connector": connector, "kv_connector_extra_config": extra}))
    assert found["kv_connector_extra_config"] == extra


def test_a_mooncake_connector_among_several_has_a_bootstrap_server() -> None:
    assert has_bootstrap_server({"kv_connector": "MooncakeConnector"})
    assert has_bootstrap_server(several("MooncakeConnector", "OffloadingConnector"))
    assert not has_bootstrap_server(several("NixlConnector", "OffloadingConnector"))


def test_all_keys_of_the_adapter_are_known_and_documented() -> None:
    """The adapter itself is not imported by the fleet."""
    keys = asdict(AdapterOptions())
    read_transfer(json.dumps({"kv_connector": "P2pConnector", "kv_connector_extra_config": keys}))
    page = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text()
    table = page.partition("| key | meaning |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(keys)


def several(*names: str) -> dict[str, Any]:
    extra = {"connectors": [{"kv_connector": name} for name in names]}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("P2pConnector", "OffloadingConnector"), ("KvferryMultiConnector", "P2pConnector", "OffloadingConnector")),
        (("NixlConnector", "OffloadingConnector"), ("MultiConnector", "NixlConnector", "OffloadingConnector")),
        (("P2pConnector", "ExampleConnector"), ("MultiConnector", "KvferryP2pConnector", "ExampleConnector")),
    ],
    ids=["ours", "theirs", "both"],
)
def test_several_connectors_have_the_names_that_vllm_knows(names: tuple[str, ...], found: tuple[str, ...]) -> None:
    transfer = read_transfer(json.dumps(several(*names)))
    children = transfer["kv_connector_extra_config"]["connectors"]
    assert (transfer["kv_connector"], *(child["kv_connector"] for child in children)) == found


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_cache_may_only_save_or_only_load_on_p_and_on_d(role: str) -> None:
    cache = {"kv_connector": "OffloadingConnector", "kv_role": role}
    ours = {"kv_connector": "KVStoreConnector", "kv_role": role}
    ours["kv_connector_extra_config"] = {"store": "memory:1GiB", "hand_off": False}  # type: ignore[assignment]
    beside = several("NixlConnector")
    beside["kv_connector_extra_config"]["connectors"].append(cache)
    for said in (cache, ours, beside):
        for member in ("prefill", "decode"):
            theirs = transfer_for_member(read_transfer(json.dumps(said)), member, f"{member}-0", 0)  # type: ignore[arg-type]
            last = theirs.get("kv_connector_extra_config", {}).get("connectors", [theirs])[-1]
            assert last["kv_role"] == role


@pytest.mark.parametrize("name", ["NixlConnector", "KvferryP2pConnector"])
def test_among_several_too_what_hands_off_has_no_other_role(name: str) -> None:
    said = several(name)
    said["kv_connector_extra_config"]["connectors"][0]["kv_role"] = "kv_consumer"
    with pytest.raises(ConfigError, match="a prefill instance cannot have kv_role kv_consumer"):
        transfer_for_member(read_transfer(json.dumps(said)), "prefill", "prefill-0", 0)


def test_kvferry_s_connectors_are_told_where_their_node_is_reached() -> None:
    def told(said: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = transfer_for_member(read_transfer(json.dumps(said)), "decode", "d", 0, "10.0.0.3")[
            "kv_connector_extra_config"
        ]
        return extra

    assert told({"kv_connector": "P2pConnector"}) == {"kv_ip": "10.0.0.3"}
    assert told({"kv_connector": "P2pConnector", "kv_ip": "10.9.9.9"}) == {"kv_ip": "10.9.9.9"}
    theirs, ours = told(several("NixlConnector", "KvferryOffloadingConnector"))["connectors"]
    assert "kv_ip" not in theirs.get("kv_connector_extra_config", {})
    assert ours["kv_connector_extra_config"]["kv_ip"] == "10.0.0.3"


def test_a_cache_among_several_saves_and_loads_in_every_role() -> None:
    kept = {"kv_connector": "KvferryOffloadingConnector", "kv_connector_extra_config": {"hand_off": False}}
    said = several("KvferryP2pConnector")
    said["kv_connector_extra_config"]["connectors"].append(kept)
    theirs = transfer_for_member(read_transfer(json.dumps(said)), "decode", "decode-0", 0)
    roles = [child.get("kv_role") for child in theirs["kv_connector_extra_config"]["connectors"]]
    assert roles == ["kv_consumer", "kv_both"]
    beside = transfer_for_member(
        read_transfer(json.dumps(several("NixlConnector", "KvferryOffloadingConnector"))), "decode", "", 0
    )
    roles = [child.get("kv_role") for child in beside["kv_connector_extra_config"]["connectors"]]
    assert roles == ["kv_consumer", "kv_both"]
    ours = transfer_for_member(
        read_transfer(json.dumps(several("P2pConnector", "OffloadingConnector"))), "decode", "d", 0
    )
    assert ours["kv_role"] == "kv_consumer"
    assert not any("kv_role" in child for child in ours["kv_connector_extra_config"]["connectors"])


LMCACHES = "LMCacheConnectorV1"
THERE = VllmEnvironment(
    "/v/python",
    "0.32.0",
    True,
    True,
    ("mooncake",),
    ("NixlConnector", "OffloadingConnector", "MultiConnector", LMCACHES),
)


BESIDE = [{"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}]


@pytest.mark.parametrize(
    ("transfer", "told"),
    [
        ({"kv_connector": "P2pNcclConnector"}, "of vLLM 0.32.0 'P2pNcclConnector'; did you mean 'KvferryP2pNccl"),
        ({"kv_connector": "KvferryP2pNcclConnector"}, "is for GPUs, and vLLM in the environment of /v/python"),
        ({"kv_connector": LMCACHES}, "LMCacheConnectorV1 is for GPUs, and vLLM in the environment of /v/python"),
        ({"kv_connector": "OffloadingConnector"}, 'needs "cpu_bytes_to_use"'),
        ({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["UCX", "GDS"]}}, "GDS is for GP"),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": BESIDE}}, "cpu_bytes_to_use"),
        ({"kv_connector": "MooncakeConnector"}, "unknown kv_connector"),
        ({"kv_connector": "MultiConnector"}, 'needs "connectors"'),
        ({"kv_connector": "NeuronConnector"}, "'NeuronConnector' is a connector of vLLM for AWS Neuron"),
        (
            {"kv_connector": "KvferryP2pConnector", "kv_connector_extra_config": {"transport": "nccl"}},
            "transport 'nccl' is for GPUs, and vLLM in the environment of /v/python",
        ),
        (several("NixlConnector", "KvferryP2pConnector"), "NixlConnector and KvferryP2pConnector would both hand"),
        (several("KvferryP2pConnector", "KvferryOffloadingConnector"), '"hand_off": false'),
        (
            {"kv_connector": "KvferrySharedStorageConnector", "kv_connector_extra_config": IN_PROC},
            "KV blocks in /proc/x",
        ),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [
                        {"kv_connector": "KvferrySharedStorageConnector", "kv_connector_extra_config": IN_PROC}
                    ]
                },
            },
            "KV blocks in /proc/x",
        ),
    ],
)
def test_what_cannot_work_there_is_told_at_once(transfer: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        require_usable_connectors(transfer, THERE, ())


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="MooncakeConnector needs mooncake, which is not installed"):
        require_usable_connectors({"kv_connector": "MooncakeConnector"}, replace(THERE, connectors=()), ())
    require_usable_connectors({"kv_connector": "KvferryMooncakeConnector"}, THERE, ())


def test_what_may_work_there_is_left_to_vllm() -> None:
    require_usable_connectors({"kv_connector": "OffloadingConnector"}, THERE, ("--kv-offloading-size", "4"))
    require_usable_connectors({"kv_connector": "Mine", "kv_connector_module_path": "mine"}, THERE, ())
    require_usable_connectors(several("NixlConnector", "KvferryOffloadingConnector"), THERE, ())
    require_usable_connectors({"kv_connector": "Mine"}, replace(THERE, connectors=()), ())
    require_usable_connectors({"kv_connector": LMCACHES}, replace(THERE, on_cpu=False), ())
    require_usable_connectors({"kv_connector": LMCACHES, "kv_connector_module_path": "mine"}, THERE, ())
    require_usable_connectors({"kv_connector": "NixlConnector", "kv_connector_extra_config": "no object"}, THERE, ())


@pytest.mark.parametrize("module", ["no_such_module_of_anyones", "json.no_such", "kvferry.nothing.at_all", "..x", ""])
def test_a_module_that_vllms_environment_does_not_have_is_named_before_anything_starts(module: str) -> None:
    here = replace(THERE, python=sys.executable)
    with pytest.raises(ConfigError, match=r"kv_connector_module_path .* cannot be imported in the environment of"):
        require_usable_connectors({"kv_connector": "Mine", "kv_connector_module_path": module}, here, ())
    require_usable_connectors({"kv_connector": "Mine", "kv_connector_module_path": "json.decoder"}, here, ())


def test_a_port_as_text_is_counted_up_for_each_instance() -> None:
    transfer = read_transfer('{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_port":"21001"}')
    assert transfer_for_member(transfer, "decode", "decode-0", 2)["kv_port"] == 21003
