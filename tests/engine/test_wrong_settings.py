"""What is set wrongly is told before the weights are read, which may take minutes."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.models.catalog import resolve

TINY = "kvferry/tiny-python"


class WeightsWereRead(KvferryError):
    """It is too late."""


def start(transfer: dict[str, Any] | None = None, token: str = "", **settings: Any) -> None:
    def progress(phase: str, share: float) -> None:
        if "weights" in phase:
            raise WeightsWereRead

    config = EngineConfig(**{"model": TINY, "dtype": "float32", **settings})
    parsed = None if transfer is None else parse_transfer_config(json.dumps(transfer))
    Engine(config, parsed, auth_token=token, on_progress=progress).close()


def p2p(**settings: Any) -> dict[str, Any]:
    return {"kv_connector": "P2pConnector", **settings}


def store(**settings: Any) -> dict[str, Any]:
    return {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": settings}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_the_weights_are_read_where_nothing_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(WeightsWereRead):
        start(
            several(p2p(), store(store=f"file:{tmp_path}/new")), kv_cache_memory="1MiB", kv_events="tcp://127.0.0.1:*"
        )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kv_cache_memory": "1KiB"}, "needs at least two blocks of 192.0 KiB"),
        ({"kv_cache_memory": "383KiB"}, "needs at least two blocks"),
        ({"kv_cache_memory": "64MiB", "block_size": 10**7}, "lower --block-size"),
        ({"kv_cache_memory": "100TiB"}, "--kv-cache-memory 100TiB: this machine has"),
        ({"kv_cache_memory": "9" * 400}, "is more than any machine has"),
        ({"num_threads": 10**6}, "--num-threads must be at most 1024"),
        ({"max_model_len": 10**7}, "--max-model-len 10000000 is not between"),
        ({"model_patch": ("nowhere:Patch",)}, "cannot import 'nowhere'"),
        ({"model_patch": ("cpu_kernels?rows=1",)}, "cpu_kernels.rows is not a known key"),
        ({"kv_events": "tcp://192.0.2.1:5557"}, "--kv-events tcp://192.0.2.1:5557"),
    ],
    ids=str,
)
def test_of_the_engine(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        start(**settings)


@pytest.mark.parametrize("around", [lambda one: one, several], ids=["alone", "of several"])
@pytest.mark.parametrize(
    ("transfer", "told"),
    [
        (p2p(kv_ip="192.0.2.1"), "cannot listen on kv_ip 192.0.2.1"),
        (p2p(kv_ip="no host"), "cannot listen on kv_ip no host"),
        (p2p(kv_ip="0.0.0.0"), "set KVFERRY_AUTH_TOKEN"),
        (store(store="file:/proc/nowhere"), "cannot keep KV blocks in /proc/nowhere"),
        (store(store="file:/proc"), "cannot keep KV blocks in /proc: "),
        (store(store=["memory:1MiB", "memory:900TiB"]), "store memory:900TiB: this machine has"),
    ],
    ids=str,
)
def test_of_a_connector(transfer: dict[str, Any], told: str, around: Any) -> None:
    with pytest.raises(ConfigError, match=told):
        start(around(transfer), token="" if "TOKEN" in told else "secret")


def test_addresses_that_others_have(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"kv_port {taken}: .*Address already in use"):
        start(p2p(kv_port=taken))
    with pytest.raises(ConfigError, match=r"--kv-events .*Address already in use"):
        start(kv_events=f"tcp://127.0.0.1:{taken}")


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    folder = shutil.copytree(str(resolve(TINY)), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        start(model=str(folder))
