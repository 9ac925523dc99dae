"""Authorities and certificates, made when a test needs them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import trustme

FOLDER = "KVFERRY_TEST_CERTIFICATES"


class Authority:
    """One that signs; its files and those of what it has signed lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ca = folder, folder / "ca.pem"
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str = "member", *names: str, valid_until: datetime | None = None) -> tuple[Path, Path]:
        """A certificate for this machine's addresses or for `names`, and its key."""
        begin = min(datetime.now(UTC), valid_until or datetime.max.replace(tzinfo=UTC)) - timedelta(days=1)
        issued = self._authority.issue_cert(
            *(names or ("127.0.0.1", "localhost")), not_before=begin, not_after=valid_until
        )
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.private_key_pem.write_to_path(str(key))
        for number, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(str(cert), append=bool(number))
        return cert, key

    def expired(self) -> tuple[Path, Path]:
        """One that was valid until yesterday."""
        return self.issue("expired", valid_until=datetime.now(UTC) - timedelta(days=1))

    def options(self, cert: Path, key: Path) -> dict[str, str]:
        """As `kv_connector_extra_config` has them."""
        return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(self.ca)}


@cache
def member_options() -> dict[str, str]:
    """One certificate for all that a test starts, in other processes too."""
    if folder := os.environ.get(FOLDER):
        files = Path(folder) / "member.pem", Path(folder) / "member.key", Path(folder) / "ca.pem"
        return dict(zip(("tls_cert", "tls_key", "tls_ca"), map(str, files), strict=True))
    folder = tempfile.mkdtemp(prefix="kvferry-certificates-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    authority = Authority(Path(folder))
    return authority.options(*authority.issue())


def for_children() -> dict[str, str]:
    """The environment in which another process finds the same."""
    return {FOLDER: str(Path(member_options()["tls_ca"]).parent)}
