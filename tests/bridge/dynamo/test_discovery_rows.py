"""Rows of Dynamo's discovery, in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.bridge.dynamo.discovery_rows import read_rows


def test_rows_are_read_from_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "v1" / "mdc"
    folder.mkdir(parents=True)
    (folder / "b").write_text(json.dumps({"n": 2}))
    (folder / "a").write_text(json.dumps({"n": 1}))
    (folder / "c").write_text('{"half":')
    (folder / "d").write_text("[1]")
    environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path)}
    assert [*read_rows("mdc", environment)] == [{"n": 1}, {"n": 2}]
    with pytest.raises(OSError, match="No such file"):
        [*read_rows("none", environment)]


def test_another_discovery_has_none() -> None:
    assert [*read_rows("mdc", {"DYN_DISCOVERY_BACKEND": "kubernetes"})] == []


def test_an_address_of_etcd_must_be_http() -> None:
    with pytest.raises(ValueError, match="no http:// address"):
        [*read_rows("mdc", {"ETCD_ENDPOINTS": "ftp://host:1,http://b:2"})]


def test_an_etcd_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        [*read_rows("mdc", {"ETCD_ENDPOINTS": "http://127.0.0.1:9"}, timeout_s=2.0)]
