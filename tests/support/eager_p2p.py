"""The P2P connector, announcing each layer at once: the layers of tests' models are small."""

from __future__ import annotations

from dataclasses import replace

from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.connectors.registry import P2P


class EagerWorkerSide(P2pWorkerSide):
    gather_bytes = 0


EagerP2pConnector = replace(P2P, worker_side=f"{__name__}:EagerWorkerSide")
