"""Copies of files with settings, as they were at the start of a router with several workers.

A worker that is started later reads these: after a change of a file it would go by other settings than its siblings.
They are in memory, so that no key is on a disk where nobody expects it, and are inherited by descriptor.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvferry.http.config import HttpConfig, InstanceAccess
from kvferry.router.config import RouterConfig
from kvferry.router.tenants import Limits, read_tenants


class FileCopies:
    """Owns them; to be closed when no worker is started any more."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self.descriptors: list[int] = []
        """Those that a worker has to inherit, under the same numbers."""

    def fix(
        self, config: RouterConfig, http: HttpConfig, access: InstanceAccess
    ) -> tuple[RouterConfig, HttpConfig, InstanceAccess]:
        """The same settings, with the copies' paths; the file of instances, which is followed, stays. Raises
        `ConfigError` for a file that cannot be used, by its own name."""
        http.tls_context()
        access.tls_context()
        if config.tenants_file is not None:
            read_tenants(config.tenants_file, Limits())
        return (
            replace(config, tenants_file=self._copy(config.tenants_file)),
            replace(
                http,
                tls_cert=self._copy(http.tls_cert),
                tls_key=self._copy(http.tls_key),
                tls_ca=self._copy(http.tls_ca),
            ),
            replace(access, instance_cert=self._copy(access.instance_cert)),
        )

    def _copy(self, path: Path | None) -> Path | None:
        if path is None:
            return None
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        self._open.callback(os.close, descriptor)
        self.descriptors.append(descriptor)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(path.read_bytes())
        return Path(f"/proc/self/fd/{descriptor}")

    def close(self) -> None:
        """Forget them."""
        self._open.close()
        self.descriptors.clear()
