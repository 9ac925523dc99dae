"""The picker as a process: gRPC for gateways, and a router's HTTP server without clients' paths (health, metrics,
decisions, instances, registration)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health

from kvferry.core.errors import ConfigError
from kvferry.core.runtime.process_exit import ShutdownDeadline, shutdown_deadline
from kvferry.core.runtime.threads import run_server
from kvferry.core.settings.files import read_whole
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer, signals_end
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.listen import authority
from kvferry.http.server.routes import Routes
from kvferry.router.app import Router, build_router
from kvferry.router.config import RouterConfig
from kvferry.router.instances.pools import configured_instances
from kvferry.router.picker.config import PickerConfig
from kvferry.router.picker.stream import ProcessedRequest
from kvferry.router.server import freeze_garbage_collector

logger = logging.getLogger(__name__)

EXTERNAL_PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
_READY = ("readiness", EXTERNAL_PROCESSOR, "")
"""Services in gRPC's health check that report readiness; `liveness` reports that the process is running."""


def run_picker(
    config: RouterConfig,
    picker: PickerConfig,
    http: HttpConfig,
    access: InstanceAccess | None = None,
    *,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code. `on_ready`: called with {"url": …, "grpc": "host:port"}
    once gateways are served. Raises `ConfigError`."""
    if (config.workers or 1) > 1:
        raise ConfigError("--workers is for a router; start several pickers behind one Kubernetes service instead")
    for _, url, _ in configured_instances(config):
        _require_address(url)
    with shutdown_deadline() as deadline:
        return run_server(deadline.run(_serve(config, picker, http, access, on_ready, deadline)))


def _require_address(url: str) -> None:
    """Raise `ConfigError` unless the URL's host is an address: gateways do not accept names."""
    try:
        ip_address(urlsplit(url).hostname or "")
    except ValueError as error:
        raise ConfigError(f"{url}: a picker names instances by address; give it as http://ADDRESS:PORT") from error


async def _serve(
    config: RouterConfig,
    picker: PickerConfig,
    http: HttpConfig,
    access: InstanceAccess | None,
    on_ready: Callable[[dict[str, Any]], None],
    deadline: ShutdownDeadline,
) -> int:
    router = build_router(config, http, access)
    freeze_garbage_collector()
    server = HttpServer(Routes(router.table()), http, Lifecycle("picker"), router.guard)
    server.listen()
    if not (http.tls_verify_clients or _is_loopback(http.host)):
        logger.warning(
            "whoever reaches port %d can ask where requests go, and say how instances answered: let only gateways reach"
            " it, or have them show a certificate (--tls-cert, --tls-ca, --tls-verify-clients)",
            picker.grpc_port,
        )
    gateways, health = grpc_server(router, picker, http)
    port = bind(gateways, picker, http)

    def serving(host: str, http_port: int) -> None:
        url = f"{http.scheme}://{authority(http.host, http_port)}"
        on_ready({"url": url, "grpc": authority(http.host, port)})

    async def set_status(status: int) -> None:
        for name in _READY:
            await health.set(name, status)

    with signals_end(server):
        async with router.running():
            await router.health.probe_all()
            await health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
            await set_status(health_pb2.HealthCheckResponse.SERVING)
            await gateways.start()
            try:
                await server.run(serving)
            finally:
                await set_status(health_pb2.HealthCheckResponse.NOT_SERVING)
                await gateways.stop(http.shutdown_grace_s)
    return 0


def grpc_server(
    router: Router, picker: PickerConfig, http: HttpConfig
) -> tuple[grpc.aio.Server, grpc_health.HealthServicer]:
    """Create the server for gateways, not started, and its health service."""
    max_requests = router.services.config.max_in_flight + router.services.config.max_waiting
    server = grpc.aio.server(maximum_concurrent_rpcs=2 * max_requests, options=[("grpc.so_reuseport", 0)])

    async def process(messages: Any, stream: Any) -> None:
        await ProcessedRequest(router, picker, http.limits, stream).run()

    handler = grpc.stream_stream_rpc_method_handler(process, _decoded, ext_proc.ProcessingResponse.SerializeToString)
    generic_handler = grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": handler})
    server.add_generic_rpc_handlers((generic_handler,))
    health = grpc_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server, health


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _decoded(data: bytes) -> ext_proc.ProcessingRequest:
    """Decode a gateway's message; an empty message, which is invalid, if it cannot be decoded."""
    try:
        return ext_proc.ProcessingRequest.FromString(data)
    except DecodeError:
        return ext_proc.ProcessingRequest()


def bind(server: grpc.aio.Server, picker: PickerConfig, http: HttpConfig) -> int:
    """Listen for gateways; return the port. With --tls-verify-clients, gateways need a certificate of --tls-ca. Raises
    `ConfigError`."""
    address = authority(http.host, picker.grpc_port)
    try:
        if http.tls_cert is None:
            return int(server.add_insecure_port(address))
        key, cert = read_whole(http.tls_key or http.tls_cert), read_whole(http.tls_cert)
        verifies = http.tls_verify_clients and http.tls_ca is not None
        signers = read_whole(http.tls_ca) if verifies and http.tls_ca is not None else None
        credentials = grpc.ssl_server_credentials([(key, cert)], signers, require_client_auth=verifies)
        return int(server.add_secure_port(address, credentials))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another --host or --grpc-port") from error
