from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import DynamoEndpoint, parse_endpoint


def test_a_url_names_an_endpoint() -> None:
    endpoint = DynamoEndpoint(namespace="dynamo", component="prefill", role="prefill")
    assert parse_endpoint("dynamo://dynamo/prefill", "prefill") == endpoint
    assert endpoint.path == "dynamo.prefill.generate"
    other = parse_endpoint("dynamo://a-b/c_1/tokens?model=/models/a=b", "decode")
    assert other == DynamoEndpoint(
        namespace="a-b", component="c_1", endpoint="tokens", role="decode", model="/models/a=b"
    )


WRONG = (
    *(
        "dynamo://",
        "dynamo://a",
        "dynamo://a/",
        "dynamo:///b",
        "dynamo://a/b/c/d",
        "dynamo://a.b/c",
        "dynamo://a/b?x=1",
    ),
    *("dynamo://a/b?model=", "dynamo://a/b\n", "dynamo://a/" + "b" * 300),
)


@pytest.mark.parametrize("url", WRONG)
def test_others_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="dynamo://NAMESPACE/COMPONENT"):
        parse_endpoint(url, "decode")
