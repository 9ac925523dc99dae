"""Rows of Dynamo's discovery, which its client for Python does not show: read from files, or from etcd's HTTP gateway.

As of Dynamo 1.7.0.dev20261026.
"""

from __future__ import annotations

import base64
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

_LARGEST_BYTES = 16 * 2**20
"""Longest row, and longest answer of etcd, that is read."""
_ROW = msgspec.json.Decoder(dict[str, Any])


class _Pair(msgspec.Struct):
    value: str


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []


def read_rows(
    kind: str, environment: Mapping[str, str], *, path: str = "", timeout_s: float = 5.0
) -> Iterator[dict[str, Any]]:
    """All rows of a kind, such as `mdc` for cards; none for a discovery that cannot be read here. `path`: beginning of
    the keys in etcd. Blocks. Raises `OSError`, and `ValueError` for what etcd answers."""
    match environment.get("DYN_DISCOVERY_BACKEND", "etcd"):
        case "file":
            return _in_files(kind, environment)
        case "etcd":
            return _in_etcd(f"v1/{kind}/{path}", environment, timeout_s)
    return iter(())


def _in_files(kind: str, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    store = Path(environment.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv")
    for path in sorted((store / "v1" / kind).iterdir()):
        try:
            with path.open("rb") as file:
                yield _ROW.decode(file.read(_LARGEST_BYTES))
        except (FileNotFoundError, msgspec.MsgspecError):  # it went meanwhile, or is being written
            continue


def _in_etcd(prefix: str, environment: Mapping[str, str], timeout_s: float) -> Iterator[dict[str, Any]]:
    server = (environment.get("ETCD_ENDPOINTS") or "http://localhost:2379").partition(",")[0].rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise ValueError(f"ETCD_ENDPOINTS names {server!r}, which is no http:// address")
    first = prefix.encode()
    end = first[:-1] + bytes([first[-1] + 1])
    query = {"key": base64.b64encode(first).decode(), "range_end": base64.b64encode(end).decode()}
    request = urllib.request.Request(f"{server}/v3/kv/range", data=msgspec.json.encode(query), method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        pairs = msgspec.json.decode(answer.read(_LARGEST_BYTES), type=_Range).kvs
    for pair in pairs:
        yield _ROW.decode(base64.b64decode(pair.value))
