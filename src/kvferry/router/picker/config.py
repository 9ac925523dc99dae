"""Settings that an endpoint picker has beside a router's. A field's docstring is its flag's help."""

from __future__ import annotations

from typing import Annotated

from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import CountOrZero, PortOrAny, SecondsOrZero
from kvferry.core.settings.model import COMMON, Settings


class PickerConfig(Settings, frozen=True, kw_only=True):
    """The gRPC port for gateways, and the content of the picker's answers."""

    grpc_port: Annotated[PortOrAny, COMMON] = 9002
    """Port of the gRPC server for gateways: Envoy's external processing, and gRPC's health checks. 0: any free port."""

    prefill_header: str = "x-prefiller-host-port"
    """Header that names the prefill instance, as host:port, for the decode instance's side. The default is the header
    of llm-d's sidecar."""

    fallbacks: CountOrZero = 0
    """Number of other decode instances that are named after the chosen one, for a gateway that tries one after the
    other."""

    unproven_pause_s: SecondsOrZero = 1.0
    """Maximum seconds for which an instance is avoided because a gateway without a client certificate
    (--tls-verify-clients) reports an answer of 429 or 503: any client could report this. With a certificate, the
    instance is avoided for as long as it requests, up to a minute."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prefill_header.replace("-", "").isalnum() or not self.prefill_header.isascii():
            raise ConfigError(f"--prefill-header must be the name of a header, got {self.prefill_header[:80]!r}")
