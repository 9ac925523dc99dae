"""Fetches the facts of instances. kvferry's instances report them; vLLM's and SGLang's are recognised by their
answers."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from kvferry.core.errors import ConfigError, TransferError
from kvferry.core.messages.instance_facts import EventsAddress, Port, read_facts
from kvferry.kv_events.sockets import require_endpoint
from kvferry.router.config import ProtocolName
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import (
    Bootstrap,
    Facts,
    Instance,
    NotProbed,
    SglangFacts,
    UnknownFacts,
    VllmFacts,
)

FACTS_PATH = "/kvferry/instance"

SGLANG_PATH, OLDER_SGLANG_PATH = "/server_info", "/get_server_info"

_ANY_HOST = frozenset({"*", "0.0.0.0", "::", "[::]"})

T = TypeVar("T")

_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_STARTED = re.compile(rb"^process_start_time_seconds ([0-9.e+]{1,32})$", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
_COUNT = re.compile(rb"[0-9]{1,9}")


class RouterHealth(msgspec.Struct):
    """A router's answer to GET /health. `alive`: number of instances by role."""

    status: str
    alive: dict[str, int]


class _InstanceHealth(msgspec.Struct):
    engine_id: str = ""


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _VllmMetrics(msgspec.Struct, frozen=True):
    """Capacity of vLLM's KV cache in tokens, its dtype, and the start time of its process; 0 and empty if its metrics
    do not contain them."""

    num_kv_tokens: int = 0
    cache_dtype: str = ""
    process: str = ""


class _SglangEvents(msgspec.Struct):
    """Addresses of events: rank 0 publishes at `endpoint_port_base`, and each further rank at the next port."""

    endpoint_host: str
    endpoint_port_base: Port
    replay_endpoint_port_base: Port | None = None
    dp_size: int = 1


class _SglangServer(msgspec.Struct):
    disaggregation_mode: str
    disaggregation_bootstrap_port: Port = 0
    disaggregation_transfer_backend: str = ""
    served_model_name: str | None = None
    version: str = ""
    max_total_num_tokens: int | None = None
    kv_cache_dtype: str = ""
    kv_events: _SglangEvents | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Engine(msgspec.Struct):
    engine_id: str
    worker_addr: dict[int, dict[int, str]]


def is_router(health: bytes) -> bool:
    """True if this answer to GET /health is a router's. Routers that forward to each other could loop without end."""
    if not health.startswith(b"{"):
        return False
    try:
        msgspec.json.decode(health, type=RouterHealth)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def engine_id_of(health: bytes) -> str:
    """The engine id in the answer of kvferry's instances to GET /health; empty for others."""
    if not health.startswith(b"{"):
        return ""
    try:
        return msgspec.json.decode(health, type=_InstanceHealth).engine_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


async def fetch_facts(instance: Instance, connections: Connections, protocol: ProtocolName, timeout_s: float) -> Facts:
    """Fetch the facts of an instance; `NotProbed`: it cannot answer now; `UnknownFacts`: the engine is unknown. Each
    request may take `timeout_s`. Raises `ProtocolError` for facts that no kvferry instance reports.

    If the protocol was set explicitly, only the requests of that protocol are sent.
    """
    match protocol:
        case "kvferry":
            return await _fetch_kvferry_facts(instance, connections, timeout_s)
        case "sglang":
            sglang_facts = await _fetch_sglang_facts(instance, connections, timeout_s)
            return SglangFacts() if isinstance(sglang_facts, UnknownFacts) else sglang_facts
        case "nixl":
            return VllmFacts(process=(await _metrics(instance, connections, timeout_s)).process)
        case "mooncake":
            bootstrap = await _bootstrap(instance, connections, timeout_s)
            if bootstrap is None and instance.role == "prefill":
                return NotProbed()
            process = (await _metrics(instance, connections, timeout_s)).process
            return VllmFacts(bootstrap=bootstrap, process=process)
    facts = await _fetch_kvferry_facts(instance, connections, timeout_s)
    if not isinstance(facts, UnknownFacts):
        return facts
    other: Facts = facts
    if not facts.refused:  # vLLM's servers require no key for these paths
        other = await _fetch_vllm_facts(instance, connections, timeout_s)
    if isinstance(other, UnknownFacts):
        other = await _fetch_sglang_facts(instance, connections, timeout_s)
    return facts if isinstance(other, UnknownFacts) else other


async def _fetch_kvferry_facts(instance: Instance, connections: Connections, timeout_s: float) -> Facts:
    try:
        status, content = await connections.ask(instance, "GET", FACTS_PATH, timeout_s, purpose="probe")
    except TransferError:
        return NotProbed()
    if status >= 500 or status == 429:
        return NotProbed()
    if status == 200 and content.lstrip().startswith(b"{"):
        return read_facts(content)
    return UnknownFacts(refused=status in (401, 403))


async def _fetch_sglang_facts(instance: Instance, connections: Connections, timeout_s: float) -> Facts:
    server = await _ask(instance, connections, SGLANG_PATH, _SglangServer, timeout_s)
    if isinstance(server, UnknownFacts):
        server = await _ask(instance, connections, OLDER_SGLANG_PATH, _SglangServer, timeout_s)
    if not isinstance(server, _SglangServer):
        return server
    return SglangFacts(
        version=server.version,
        model_names=[server.served_model_name] if server.served_model_name else [],
        mode=server.disaggregation_mode,
        bootstrap_port=server.disaggregation_bootstrap_port,
        transfer_backend=server.disaggregation_transfer_backend,
        num_kv_tokens=max(0, server.max_total_num_tokens or 0),
        cache_dtype=server.kv_cache_dtype,
        kv_events=_sglang_events(server, instance.address.host),
    )


def _sglang_events(server: _SglangServer, host: str) -> EventsAddress | None:
    """Address of the server's events; None also with several data-parallel ranks, since each has its own cache."""
    events = server.kv_events
    if events is None or events.dp_size != 1 or not events.endpoint_port_base:
        return None
    publisher = host if events.endpoint_host in _ANY_HOST else events.endpoint_host
    name = f"[{publisher}]" if ":" in publisher and not publisher.startswith("[") else publisher
    replay_port = events.replay_endpoint_port_base
    try:
        return EventsAddress(
            endpoint=require_endpoint(f"tcp://{name}:{events.endpoint_port_base}", SGLANG_PATH),
            replay_endpoint=f"tcp://{name}:{replay_port}" if replay_port else None,
        )
    except ConfigError:
        return None


async def _fetch_vllm_facts(instance: Instance, connections: Connections, timeout_s: float) -> Facts:
    version = await _ask(instance, connections, "/version", _Version, timeout_s)
    if not isinstance(version, _Version):
        return version
    models = await _ask(instance, connections, "/v1/models", _Models, timeout_s)
    cards = models.data if isinstance(models, _Models) else []  # a server with an API key refuses
    if any(card.owned_by != "vllm" for card in cards):
        return UnknownFacts()
    metrics = await _metrics(instance, connections, timeout_s)
    return VllmFacts(
        version=version.version,
        model_names=[card.id for card in cards],
        num_kv_tokens=metrics.num_kv_tokens,
        cache_dtype=metrics.cache_dtype,
        process=metrics.process,
        bootstrap=await _bootstrap(instance, connections, timeout_s),
    )


async def _metrics(instance: Instance, connections: Connections, timeout_s: float) -> _VllmMetrics:
    try:
        status, text = await connections.metrics(instance, timeout_s)
    except TransferError:
        return _VllmMetrics()
    line = _CACHE_CONFIG.search(text) if status == 200 else None
    labels = dict(_LABEL.findall(line[1])) if line else {}
    blocks, size = labels.get(b"num_gpu_blocks", b""), labels.get(b"block_size", b"")
    num_tokens = int(blocks) * int(size) if _COUNT.fullmatch(blocks) and _COUNT.fullmatch(size) else 0
    started = _STARTED.search(text) if status == 200 else None
    return _VllmMetrics(
        num_tokens, labels.get(b"cache_dtype", b"").decode(errors="replace"), started[1].decode() if started else ""
    )


async def _bootstrap(instance: Instance, connections: Connections, timeout_s: float) -> Bootstrap | None:
    """Fetch the engines of a prefill instance's bootstrap server; None if there is none."""
    if instance.role != "prefill":
        return None
    address = instance.address
    host = f"[{address.host}]" if ":" in address.host else address.host
    server = Instance("prefill", f"http://{host}:{address.bootstrap_port}")
    try:
        status, body = await connections.ask(server, "GET", "/query", timeout_s)
    except TransferError:
        return None
    return read_bootstrap(server.url, body) if status == 200 else None


def read_bootstrap(url: str, answer: bytes) -> Bootstrap | None:
    """Parse a bootstrap server's answer; None if it is another server, or no worker has registered yet."""
    try:
        engines = msgspec.json.decode(answer, type=dict[int, _Engine])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    engine_ids = {rank: engine.engine_id for rank, engine in engines.items() if engine.worker_addr}
    return Bootstrap(url=url, engines=engine_ids) if engine_ids else None


async def _ask(
    instance: Instance, connections: Connections, path: str, kind: type[T], timeout_s: float
) -> T | NotProbed | UnknownFacts:
    try:
        status, body = await connections.ask(instance, "GET", path, timeout_s)
    except TransferError:
        return NotProbed()
    if status >= 500 or status == 429:
        return NotProbed()
    try:
        return msgspec.json.decode(body, type=kind) if status == 200 else UnknownFacts()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UnknownFacts()
