"""The card that a worker of Dynamo's registers: which model it serves, and how much of it.

With Dynamo's discovery by `kubernetes`, the endpoint's `model` is used instead. As of Dynamo 1.7.0.dev20261026.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvferry.bridge.dynamo.discovery_rows import read_rows
from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import DynamoEndpoint

_CARDS = "mdc"
_METADATA = "/v1/metadata/"


class Runtime(msgspec.Struct, frozen=True):
    """The size of a worker by its own report; 0 and None: not reported."""

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
    system_url: str = ""
    """Origin of the worker's system server, if the card says where it is."""
    digest: str = ""
    """Digest of the checksums of configuration, tokenizer and templates, which the card has."""


def read_card(
    endpoint: DynamoEndpoint, instance_id: int, environment: Mapping[str, str], timeout_s: float
) -> ModelCard:
    """The card of a worker. Blocks. Raises `ConfigError` if it cannot be had, and none is needed if the endpoint names
    the model."""
    backend = environment.get("DYN_DISCOVERY_BACKEND", "etcd")
    path = (endpoint.namespace, endpoint.component, endpoint.endpoint)
    try:
        for row in read_rows(_CARDS, environment, path="/".join(path) + "/", timeout_s=timeout_s):
            if tuple(map(row.get, ("namespace", "component", "endpoint", "instance_id"))) == (*path, instance_id):
                return parse_card(msgspec.json.encode(row.get("card_json")))
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
    content_json = msgspec.json.decode(content)
    checksums = sorted(_checksums(content_json))
    digest = hashlib.sha256("\n".join([card.display_name, *checksums]).encode()).hexdigest()[:32]
    return msgspec.structs.replace(card, digest=digest, system_url=_system_url(content_json))


def _system_url(content: Any) -> str:
    """A worker with a system server serves its model's files there, unless told otherwise, and its card has their
    URLs."""
    info = content.get("model_info") if isinstance(content, dict) else None
    config = next(iter(info.values()), None) if isinstance(info, dict) else None
    url = config.get("path") if isinstance(config, dict) else None
    if not isinstance(url, str) or _METADATA not in url or not url.startswith(("http://", "https://")):
        return ""
    return url.partition(_METADATA)[0]


def _checksums(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "checksum":
                yield str(inner)
            else:
                yield from _checksums(inner)
