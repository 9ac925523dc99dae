"""Workers' cards, as Dynamo 1.7.0.dev20261026 writes them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvferry.bridge.dynamo.card import parse_card, read_card
from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import DynamoEndpoint

ENDPOINT = DynamoEndpoint(namespace="dynamo", component="backend", role="decode")
CARD: dict[str, Any] = {
    "display_name": "m",
    "source_path": "/models/m",
    "model_info": {"hf_config_json": {"path": "/models/m/config.json", "checksum": "blake3:1", "size": 717}},
    "tokenizer": {"hf_tokenizer_json": {"path": "/models/m/tokenizer.json", "checksum": "blake3:2"}},
    "context_length": 2048,
    "kv_cache_block_size": 32,
    "worker_type": "decode",
    "runtime_config": {"total_kv_blocks": 341, "max_num_seqs": 128},
}


def row(instance_id: int, **changes: Any) -> bytes:
    """What the store has of one worker."""
    named = {"namespace": "dynamo", "component": "backend", "endpoint": "generate", "instance_id": instance_id}
    return json.dumps({"type": "Model", **named, "card_json": CARD, **changes}).encode()


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "v1" / "mdc"
    folder.mkdir(parents=True)
    (folder / "dynamo%2Fbackend%2Fgenerate%2F1").write_bytes(row(1))
    (folder / "dynamo%2Fprefill%2Fgenerate%2F7").write_bytes(row(7, component="prefill"))
    (folder / "half a file").write_bytes(row(7)[:100])
    return {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path)}


def test_a_card_is_found_in_files(store: dict[str, str]) -> None:
    card = read_card(ENDPOINT, 1, store, 1.0)
    assert (card.display_name, card.source_path, card.worker_type) == ("m", "/models/m", "decode")
    assert (card.context_length, card.kv_cache_block_size, card.runtime_config.total_kv_blocks) == (2048, 32, 341)


def test_a_card_that_is_missing_needs_a_model(store: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"\?model=FOLDER"):
        read_card(ENDPOINT, 7, store, 1.0)
    named = DynamoEndpoint(namespace="dynamo", component="backend", role="decode", model="/models/other")
    assert read_card(named, 7, store, 1.0).source_path == "/models/other"
    assert read_card(named, 7, {"DYN_DISCOVERY_BACKEND": "kubernetes"}, 1.0).display_name == "/models/other"


def test_the_digest_is_of_the_files_and_not_of_their_places() -> None:
    moved = json.dumps(CARD).replace("/models/m/", "/elsewhere/").encode()
    other = json.dumps(CARD).replace("blake3:2", "blake3:3").encode()
    digest = parse_card(json.dumps(CARD).encode()).digest
    assert parse_card(moved).digest == digest
    assert parse_card(other).digest != digest


def test_the_system_server_is_where_the_files_are_served() -> None:
    config = "http://127.0.0.1:18081/v1/metadata/dynamo/backend/generate/m/_base/config.json"
    served = {**CARD, "model_info": {"hf_config_json": {"path": config, "checksum": "blake3:1"}}}
    assert parse_card(json.dumps(served).encode()).system_url == "http://127.0.0.1:18081"
    assert parse_card(json.dumps(CARD).encode()).system_url == ""
    for info in (None, [], {}, {"x": None}, {"x": {"path": 7}}, {"x": {"path": "file:///v1/metadata/"}}):
        assert parse_card(json.dumps({**CARD, "model_info": info}).encode()).system_url == ""


@pytest.fixture
def etcd() -> Iterator[tuple[str, list[bytes]]]:
    """The address of etcd's gateway, and the keys that were asked for."""
    asked: list[bytes] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(base64.b64decode(query["key"]))
            values = [{"value": base64.b64encode(row(one)).decode()} for one in (1, 2)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"kvs": values}).encode())

        def log_message(self, *arguments: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_card_is_found_in_etcd(etcd: tuple[str, list[bytes]]) -> None:
    url, asked = etcd
    assert read_card(ENDPOINT, 2, {"ETCD_ENDPOINTS": url}, 5.0).display_name == "m"
    assert asked == [b"v1/mdc/dynamo/backend/generate/"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_card(ENDPOINT, 2, {"ETCD_ENDPOINTS": "http://127.0.0.1:9"}, 1.0)
    with pytest.raises(ConfigError, match="no http"):
        read_card(ENDPOINT, 2, {"ETCD_ENDPOINTS": "file:///etc/passwd"}, 1.0)
