"""Credentials for requests to instances. A field's docstring is its flag's help."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated

from kvferry.core.errors import ConfigError
from kvferry.core.settings.model import SECRET, Settings
from kvferry.http.headers import require_key
from kvferry.http.key_files import read_keys
from kvferry.http.tls import client_context


class InstanceAccess(Settings, frozen=True, kw_only=True):
    """A router's credentials for its instances."""

    instance_api_key: Annotated[str | None, SECRET] = None
    """API key that the router sends to the instances, instead of the Authorization header of clients. Without it, the
    clients' own Authorization header is forwarded."""

    instance_api_key_file: Path | None = None
    """File with the API key that the router sends to the instances, instead of --instance-api-key."""

    instance_cert: Path | None = None
    """Certificate chain (PEM), with its key in the same file, that the router presents to instances that ask for
    one."""

    def __post_init__(self) -> None:
        if self.instance_api_key is not None:
            require_key(self.instance_api_key, "--instance-api-key")
            if self.instance_api_key_file is not None:
                raise ConfigError("--instance-api-key and --instance-api-key-file: give one of them")

    def api_key(self) -> str | None:
        """The key, from the flag or the file. Raises `ConfigError` if the file does not have exactly one."""
        if self.instance_api_key_file is None:
            return self.instance_api_key
        keys = read_keys("--instance-api-key-file", self.instance_api_key_file)
        if len(keys) > 1:
            raise ConfigError(f"--instance-api-key-file {self.instance_api_key_file} contains more than one key")
        return keys[0]

    def tls_context(self, tls_ca: Path | None = None) -> ssl.SSLContext:
        """The TLS context for connections to https:// URLs. Raises `ConfigError` if a file cannot be used."""
        return client_context(tls_ca, self.instance_cert)
