from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import read_options


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    lease_s: Annotated[float, Meta(gt=0)] = 30.0
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    streams: int = 1
    sizes: list[Annotated[int, Meta(ge=1)]] = []
    kind: Literal["fast", "small"] = "fast"
    kinds: tuple[Literal["fast", "small"], ...] = ()
    members: dict[Literal["fast", "small"], int] | None = None


def test_given_values_are_converted_and_others_have_their_defaults() -> None:
    assert read_options(Options, {"path": "/x", "lease_s": 5}) == Options(path="/x", lease_s=5.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "/x", "leases": 3}, r"kv_connector_extra_config\.leases is not a known key; did you mean 'lease_s'"),
        ({"path": "/x", "zzz": 3}, "known: path, lease_s, share, streams, sizes, kind"),
        ({}, r"kv_connector_extra_config\.path is required"),
        ({"path": 7}, r"kv_connector_extra_config\.path: "),
        ({"path": "/x", "lease_s": 0}, r"kv_connector_extra_config\.lease_s: "),
        ({"path": "/x", "lease_s": "soon"}, r"kv_connector_extra_config\.lease_s: "),
        ({"path": "/x", "share": 1.5}, r"share: must be greater than 0 and less than 1, got 1\.5"),
        ({"path": "/x", "streams": 1.5}, r"kv_connector_extra_config\.streams: "),
        ({"path": "/x", "streams": 1e400}, r"kv_connector_extra_config\.streams: "),
        ({"path": "/x", "sizes": 5}, r"kv_connector_extra_config\.sizes: Expected `array`"),
        ({"path": None}, r"kv_connector_extra_config\.path: "),
        ({"path": "/x", "kind": "smal"}, r"config\.kind: 'smal' is not a known value; did you mean 'small'\?"),
        (
            {"path": "/x", "kinds": ["fast", "quick"]},
            r"kinds: 'quick' is not a known value; known: fast, small",
        ),
        ({"path": "/x", "members": {"fats": 1}}, r"config\.members: 'fats' is not a known value; did you mean 'fast'"),
        ({"path": "/x", "kind": 3}, r"config\.kind: "),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(Options, given)


@pytest.mark.parametrize("key", Options.__struct_fields__)
@pytest.mark.parametrize("value", [None, -1, 10**400, 1e400, [], {}, "\ud800", [10**400], {"a": "\ud800"}])
def test_whatever_the_value_it_is_taken_or_named(key: str, value: object) -> None:
    told = f"kv_connector_extra_config.{key}: "
    try:
        read_options(Options, {"path": "/x"} | {key: value})
    except ConfigError as error:
        told = str(error)
    assert told.startswith(f"kv_connector_extra_config.{key}: ")
