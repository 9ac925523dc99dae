"""Settings of the router that contradict each other, or mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.router.config import RouterConfig


def config(**settings: Any) -> RouterConfig:
    return RouterConfig(**({"prefill_url": (), "decode_url": ("http://d:1",)} | settings))


def test_what_is_written_as_text_is_a_number() -> None:
    settings = config(max_body="1KiB", max_buffered="1MiB", max_stored_bytes="2MiB", disaggregate_from="100")
    assert (settings.max_body_bytes, settings.max_buffered_bytes) == (1024, 2**20)
    assert settings.max_stored_responses_bytes == 2**21
    assert settings.fixed_threshold == 100
    assert config(disaggregate_from="auto").fixed_threshold is None


def test_a_tenant_may_be_named_by_a_header() -> None:
    assert config(tenant_by="header:X-Team").tenant_header == b"x-team"
    assert config(tenant_by="user").tenant_header == config().tenant_header == b""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bootstrap_port": (1, 2), "prefill_url": ("http://p:1",)}, "--bootstrap-port is given 2 times for 1"),
        ({"disaggregate_from": "soon"}, "--disaggregate-from must be auto or a number"),
        ({"disaggregate_from": "-1"}, "--disaggregate-from must be"),
        ({"tenant_by": "ip"}, "--tenant-by must be key, user or header:NAME"),
        ({"tenant_by": "header:"}, "--tenant-by must be"),
        ({"session_header": "a b"}, "--session-header must be the name of a header"),
        ({"forward_path": ("POST /kvferry/x",)}, "--forward-path"),
        ({"max_body": "0"}, "--max-body must be more than 0"),
        ({"max_body": "2GiB", "max_buffered": "1GiB"}, "--max-buffered .1GiB. must be at least --max-body"),
        ({"max_stored_bytes": "much"}, "--max-stored-bytes"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"page_tick_s": 0.01}, "--page-tick-s"),
        ({"dynamo_python": Path("/nowhere/python")}, "--dynamo-python /nowhere/python is no program"),
    ],
)
def test_what_is_wrong_names_its_flag(settings: dict[str, Any], says: str) -> None:
    config()
    with pytest.raises(ConfigError, match=says):
        config(**settings)
