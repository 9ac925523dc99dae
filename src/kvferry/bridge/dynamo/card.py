"""The card that a worker of Dynamo's registers: which model it serves, and how much of it.

Dynamo's runtime for Python finds workers, but does not show their cards, so they are read where its discovery keeps
them: in the files of `file`, or in etcd through its HTTP gateway. With `kubernetes`, the endpoint's `model` is used.
As of Dynamo 1.7.0.dev20261026.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import DynamoEndpoint

_CARDS = "v1/mdc"
_LARGEST_BYTES = 16 * 2**20
"""Longest card, and longest answer of etcd, that is read."""


class Runtime(msgspec.Struct, frozen=True):
    """What a worker says of its size; 0 and None: nothing."""

    context_length: int | None = 0
    total_kv_blocks: int | None = 0
    max_num_seqs: int | None = 0


class ModelCard(msgspec.Struct, frozen=True):
    """A worker's card, as far as it is used. `worker_type`: prefill, decode or aggregated."""

    display_name: str = ""
    source_path: str = ""
    worker_type: str | None = None
    context_length: int | None = 0
    architectural_max_context_length: int | None = 0
    kv_cache_block_size: int | None = 0
    runtime_config: Runtime = Runtime()
    digest: str = ""
    """Digest of the checksums of configuration, tokenizer and templates, which the card has."""


class _Row(msgspec.Struct):
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: msgspec.Raw


class _Pair(msgspec.Struct):
    value: str


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []


def read_card(
    endpoint: DynamoEndpoint, instance_id: int, environment: Mapping[str, str], timeout_s: float
) -> ModelCard:
    """The card of a worker. Blocks. Raises `ConfigError` if it cannot be had, and none is needed if the endpoint names
    the model."""
    backend = environment.get("DYN_DISCOVERY_BACKEND", "etcd")
    try:
        match backend:
            case "file":
                rows = _in_files(environment)
            case "etcd":
                rows = _in_etcd(endpoint, environment, timeout_s)
            case _:
                rows = iter(())
        for row in rows:
            named = (row.namespace, row.component, row.endpoint, row.instance_id)
            if named == (endpoint.namespace, endpoint.component, endpoint.endpoint, instance_id):
                return parse_card(bytes(row.card_json))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        if not endpoint.model:
            raise ConfigError(
                f"the card of worker {instance_id:x} of {endpoint.path} cannot be read: {error}"
            ) from error
    if endpoint.model:
        return ModelCard(endpoint.model, endpoint.model)
    raise ConfigError(
        f"worker {instance_id:x} of {endpoint.path} has no card that can be read in discovery by {backend!r}; name its"
        f" model: dynamo://{endpoint.namespace}/{endpoint.component}?model=FOLDER"
    )


def parse_card(content: bytes) -> ModelCard:
    """A card from its JSON. Raises `msgspec.MsgspecError`."""
    card = msgspec.json.decode(content, type=ModelCard)
    checksums = sorted(_checksums(msgspec.json.decode(content)))
    digest = hashlib.sha256("\n".join([card.display_name, *checksums]).encode()).hexdigest()[:32]
    return msgspec.structs.replace(card, digest=digest)


def _checksums(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "checksum":
                yield str(inner)
            else:
                yield from _checksums(inner)


def _in_files(environment: Mapping[str, str]) -> Iterator[_Row]:
    folder = Path(environment.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv") / _CARDS
    for path in sorted(folder.iterdir()):
        try:
            with path.open("rb") as file:
                yield msgspec.json.decode(file.read(_LARGEST_BYTES), type=_Row)
        except (FileNotFoundError, msgspec.MsgspecError):  # it went meanwhile, or is being written
            continue


def _in_etcd(endpoint: DynamoEndpoint, environment: Mapping[str, str], timeout_s: float) -> Iterator[_Row]:
    server = (environment.get("ETCD_ENDPOINTS") or "http://localhost:2379").partition(",")[0].rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise ValueError(f"ETCD_ENDPOINTS names {server!r}, which is no http:// address")
    prefix = f"{_CARDS}/{endpoint.namespace}/{endpoint.component}/{endpoint.endpoint}/".encode()
    behind = prefix[:-1] + bytes([prefix[-1] + 1])
    query = {"key": base64.b64encode(prefix).decode(), "range_end": base64.b64encode(behind).decode()}
    request = urllib.request.Request(f"{server}/v3/kv/range", data=msgspec.json.encode(query), method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        found = msgspec.json.decode(answer.read(_LARGEST_BYTES), type=_Range)
    for pair in found.kvs:
        yield msgspec.json.decode(base64.b64decode(pair.value), type=_Row)
