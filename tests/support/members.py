"""Instances that die and come back at the same address."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.flaky_link import FlakyLink
from support.ports import free_port
from support.processes import KvferryProcess, kvferry


class Member:
    """One instance that dies and comes back at the same address."""

    def __init__(
        self,
        role: str,
        model: Path,
        folder: Path,
        link: FlakyLink | None = None,
        *,
        transport: str = "auto",
        lease_s: float = 1.0,
        stores: tuple[str, ...] = (),
        more: tuple[str, ...] = (),
    ) -> None:
        """With `stores` (URLs), what it computes is also kept there, and read from there."""
        self.role, self.folder, self.link = role, folder, link
        extra: dict[str, Any] = {"lease_s": lease_s, "timeout_s": 2.0, "transport": transport, "checksum": True}
        if link is not None:
            extra["advertise_port"] = link.port
        transfer = {
            "kv_connector": "P2pConnector",
            "kv_port": link.upstream_port if link is not None else 0,
            "kv_connector_extra_config": extra,
        }
        if stores:
            kept = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": list(stores)}}
            both = {"connectors": [transfer, kept]}
            transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": both}
        self._arguments = (
            role,
            str(model),
            "--served-model-name=m",
            "--dtype=float32",
            "--kv-cache-memory=48MiB",
            f"--kv-transfer-config={json.dumps(transfer)}",
            *more,
        )
        self.port = free_port()
        self._stack = ExitStack()
        self.process: KvferryProcess
        self.num_starts = 0

    def start(self) -> None:
        self.num_starts += 1
        log = self.folder / f"{self.role}-{self.port}-{self.num_starts}.log"
        self.process = self._stack.enter_context(kvferry(*self._arguments, log=log, ends_cleanly=False, port=self.port))

    def stop(self) -> None:
        self._stack.close()

    def restart(self) -> None:
        self.process.kill()
        self.stop()
        self.start()
