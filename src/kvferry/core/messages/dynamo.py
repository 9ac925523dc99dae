"""Messages between a router and the process that owns Dynamo's runtime for it (`kvferry.bridge.dynamo`): lines of JSON
on that process's standard input and output."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import ConfigError

SCHEME = "dynamo://"
CONNECTOR = "Dynamo"
"""The connector that Dynamo's workers report: Dynamo does not publish which one their engine uses."""

_NAME = r"^[A-Za-z0-9_-]{1,255}\Z"
_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]


class DynamoEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint of Dynamo's, which any number of workers serve. `model`: folder or name of the tokenizer and the
    configuration, where the workers' cards cannot be read; empty: as the cards say."""

    namespace: _Name
    component: _Name
    endpoint: _Name = "generate"
    role: Literal["prefill", "decode"]
    model: str = ""

    @property
    def path(self) -> str:
        """The endpoint as Dynamo writes it."""
        return f"{self.namespace}.{self.component}.{self.endpoint}"


class BridgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The one line that the bridge is sent. It ends when its standard input does."""

    endpoints: list[DynamoEndpoint]


class WorkerUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the bridge's: a worker can be reached at `url`, or is gone. `worker` names its process."""

    url: str
    worker: str
    role: Literal["prefill", "decode"]
    state: Literal["up", "gone"]


def parse_endpoint(url: str, role: Literal["prefill", "decode"]) -> DynamoEndpoint:
    """Parse `dynamo://NAMESPACE/COMPONENT[/ENDPOINT][?model=FOLDER]`. Raises `ConfigError`."""
    path, _, query = url.removeprefix(SCHEME).partition("?")
    namespace, *rest = path.split("/")
    key, _, model = query.partition("=")
    try:
        if len(rest) not in (1, 2) or (query and (key != "model" or not model)):
            raise msgspec.ValidationError("")
        fields = {"namespace": namespace, "component": rest[0], "role": role, "model": model}
        return msgspec.convert(fields | ({"endpoint": rest[1]} if len(rest) == 2 else {}), DynamoEndpoint)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{url[:200]!r} is not dynamo://NAMESPACE/COMPONENT[/ENDPOINT][?model=FOLDER]; Dynamo's vLLM workers are"
            " dynamo://dynamo/prefill and dynamo://dynamo/backend"
        ) from None
