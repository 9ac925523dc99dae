"""Settings of one HTTP server. A field's docstring is its flag's help."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.core import entropy
from kvferry.core.errors import ConfigError
from kvferry.core.messages.openai import MAX_BODY_BYTES
from kvferry.core.settings.bounds import Bytes, PortOrAny, SecondsOrZero
from kvferry.core.settings.model import COMMON, SECRET, Settings
from kvferry.http.headers import require_key
from kvferry.http.key_files import read_keys
from kvferry.http.origins import read_origins
from kvferry.http.server.limits import HttpLimits
from kvferry.http.tls import client_context, server_context


class HttpAccess(Settings, frozen=True, kw_only=True):
    """Access to the server: keys, TLS, origins, and the admin listener."""

    api_key: Annotated[tuple[str, ...], SECRET] = ()
    """Key that clients must send as `Authorization: Bearer KEY`; repeat it for more. Prefer --api-key-file or the
    environment variable, as others on the machine can read the command line."""

    api_key_file: Annotated[Path | None, COMMON] = None
    """File with API keys, one per line."""

    admin_key: Annotated[tuple[str, ...], SECRET] = ()
    """Key for /metrics and /kvferry/*; repeat it for more. It is also accepted wherever an API key is. Without an admin
    key, these paths require an API key, if there is one."""

    admin_key_file: Path | None = None
    """File with admin keys, one per line."""

    admin_host: str = "127.0.0.1"
    """Address of the admin listener."""

    admin_port: PortOrAny | None = None
    """Port that alone serves /metrics and /kvferry/*; the port for clients then answers them with 404. 0 takes any free
    port. Not for instances behind a router, which needs these paths on the port for clients: use an admin key there."""

    tls_cert: Path | None = None
    """Certificate chain (PEM). The server then speaks HTTPS only."""

    tls_key: Path | None = None
    """Private key of --tls-cert (PEM), if it is not in the same file."""

    tls_ca: Path | None = None
    """Certificate authorities (PEM) that this process trusts: to have signed the certificates of the instances or
    routers that it connects to at https:// URLs (default: the system's authorities), and with --tls-verify-clients
    clients' certificates."""

    tls_verify_clients: bool = False
    """Serve only clients that present a certificate of an authority in --tls-ca, except for /health and /version, and
    for processes of the deployment, which sign their requests."""

    allowed_origins: tuple[str, ...] = ()
    """Origin whose pages may use the API from a browser (CORS), such as https://example.com, or * for all; repeat it
    for more, or give a JSON list as to vLLM. As in vLLM, none is allowed by default. /metrics and /kvferry/* are for
    no page."""

    access_log: bool = False
    """Log one line for every request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_cert is None and (self.tls_key is not None or self.tls_verify_clients):
            raise ConfigError("--tls-key and --tls-verify-clients need --tls-cert")
        if self.tls_verify_clients and self.tls_ca is None:
            raise ConfigError("--tls-verify-clients needs --tls-ca, the authority that signs the clients' certificates")
        read_origins(self.allowed_origins)
        for name in ("api_key", "admin_key"):
            for key in getattr(self, name):
                require_key(key, f"--{name.replace('_', '-')}")

    def api_keys(self) -> tuple[str, ...]:
        """The clients' keys, from flags and file. Raises `ConfigError` if the file cannot be read or is empty."""
        return (
            self.api_key
            if self.api_key_file is None
            else (*self.api_key, *read_keys("--api-key-file", self.api_key_file))
        )

    def admin_keys(self) -> tuple[str, ...]:
        """The operators' keys, from flags and file. Raises `ConfigError` as `api_keys`."""
        if self.admin_key_file is None:
            return self.admin_key
        return (*self.admin_key, *read_keys("--admin-key-file", self.admin_key_file))

    def tls_context(self) -> ssl.SSLContext | None:
        """The listeners' TLS context; None for plain HTTP. Raises `ConfigError`."""
        if self.tls_cert is None:
            return None
        return server_context(self.tls_cert, self.tls_key, self.tls_ca if self.tls_verify_clients else None)

    def check_files(self) -> None:
        """Raise `ConfigError` if a file cannot be used; the server reads them again later."""
        self.api_keys()
        self.admin_keys()
        self.tls_context()
        if self.tls_ca is not None:
            client_context(self.tls_ca)


class HttpConfig(HttpAccess, frozen=True, kw_only=True):
    """Settings of one server: address, limits, access, and shutdown."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""

    port: PortOrAny = 8000
    """Port to listen on; 0 takes any free one."""

    limits: HttpLimits = HttpLimits()
    """Limits of one client."""

    max_body_bytes: Bytes = MAX_BODY_BYTES
    """Longest request body; a longer one is answered with 413."""

    shutdown_grace_s: SecondsOrZero = 30.0
    """Seconds that running requests are given to end before they are aborted."""

    secret: Annotated[str, SECRET] = ""
    """The secret from which the keys of kvferry's own processes are derived (`core.keys`); empty: they have no keys."""

    name: str = msgspec.field(default_factory=partial(entropy.token_hex, 16))
    """This server's name in signed requests; all processes at one address have the same."""

    listeners: tuple[int, ...] = ()
    """Descriptors of sockets that listen already, which other processes may share: the clients', then the admin's if
    there is one. The server closes them when it accepts no more. Without them, it opens its own."""

    @property
    def scheme(self) -> str:
        """The scheme of clients' URLs."""
        return "http" if self.tls_cert is None else "https"
