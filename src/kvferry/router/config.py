"""Settings of the router. A field's docstring is its flag's help; flags, TOML and environment come from this class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import (
    Count,
    CountOrZero,
    Port,
    RateOrZero,
    Seconds,
    SecondsOrZero,
)
from kvferry.core.settings.model import COMMON, Settings, heading
from kvferry.core.settings.units import parse_bytes
from kvferry.router.paths import parse_path

_HEADER_NAME = r"[A-Za-z0-9_-]+"

NumWorkers = Annotated[int, msgspec.Meta(ge=1, le=256)]
HandOffMode = Literal["auto", "sequential", "concurrent"]
ProtocolName = Literal["auto", "kvferry", "nixl", "mooncake", "sglang", "keys"]


class RouterConfig(Settings, frozen=True, kw_only=True):
    """One router: the instances behind it, how requests are handed off, and its bounds. `heading` begins a group
    of flags in `--help` and in the reference."""

    prefill_url: Annotated[tuple[str, ...], heading("Router: instances"), COMMON] = ()
    """Base URL of a prefill instance; repeat it for more. Without any, decode instances do both phases.
    dynamo://NAMESPACE/COMPONENT: all workers of Dynamo's that its discovery has there."""

    decode_url: Annotated[tuple[str, ...], COMMON] = ()
    """Base URL of a decode instance; repeat it for more."""

    dynamo_python: Path | None = None
    """Python interpreter with kvferry and ai-dynamo-runtime, for workers of Dynamo's (URLs
    dynamo://NAMESPACE/COMPONENT). Default: the one that runs kvferry."""

    instances_file: Path | None = None
    """File with one instance per line: 'prefill URL' or 'decode URL'. The router applies changes of the file: new
    instances are added, and missing ones are drained and then removed."""

    registration: Annotated[bool, COMMON] = False
    """Take instances that register themselves (`kvferry prefill|decode --register URL`). They and the router need the
    same KVFERRY_AUTH_TOKEN. The router then also starts without any instance."""

    declared: bool = False
    """Start without any instance: an operator declares all of them (PUT /kvferry/instances), as the controller of a
    fleet does."""

    registration_lease_s: Seconds = 15.0
    """Seconds for which a registered instance stays registered without renewing its lease. It renews the lease three
    times within this time."""

    protocol: ProtocolName = "auto"
    """Protocol of the instances. auto: each instance is asked. kvferry: kvferry's own instances. nixl: vLLM servers
    where P's answer carries what D needs to fetch the KV (NixlConnector, kvferry's connectors in vLLM). mooncake: vLLM
    servers with MooncakeConnector, P and D called together. sglang: SGLang servers started with --disaggregation-mode,
    P and D called together. keys: kvferry's instances, or vLLM servers with kvferry's connectors, that share a store
    and need not reach each other: P stores the KV under a key, and D loads it by this key."""

    bootstrap_port: tuple[Port, ...] = ()
    """Port of a prefill instance's bootstrap server (Mooncake's in vLLM, SGLang's), in the order of --prefill-url.
    Default: 8998."""

    instance_kv_events: tuple[str, ...] = ()
    """Address at which a vLLM server publishes its KV events (--kv-events-config), and at which it replays them, such
    as http://10.0.0.1:8000=tcp://10.0.0.1:5557,tcp://10.0.0.1:5558; repeat it for more. kvferry's instances report
    their addresses themselves. Needs kvferry[events]."""

    policy: Annotated[str, heading("Router: choice of instances"), COMMON] = "cost"
    """Policy that chooses the instances of a request: cost (least predicted time), prefix, session, least_loaded,
    power_of_two, round_robin, random, the name of an entry point in the group kvferry.policies, or module:Class.
    Without --kv-events on the instances, policies that use prompts know only which prompts this router has sent to an
    instance, and find fewer cached ones (docs/router.md)."""

    policy_option: tuple[str, ...] = ()
    """An option of the policy, such as pressure=0.05; repeat it for more."""

    hand_off: HandOffMode = "auto"
    """When D is called: sequential, after P has answered; concurrent, at the same time; auto, concurrent between
    instances of kvferry's that offer it. Between vLLM servers with kvferry's connectors, usage has no number of cached
    tokens with concurrent."""

    disaggregate_from: str = "auto"
    """Minimum number of tokens, without cached ones, for which a prompt is computed on a prefill instance; shorter
    prompts go directly to decode. auto: adjusted to measured times, and a busy prefill pool is skipped. 0: always use a
    prefill instance."""

    session_header: str = "X-Session-Id"
    """Header in which clients name a conversation. Without it, the `user` field of the request is used."""

    keep_for_next_turn: bool = False
    """Make decode instances keep the KV of answers in named conversations (--session-header, user), so that the prefill
    instance of the next turn fetches it instead of computing the answer's tokens again. The instances need "kv_role":
    "kv_both" in --kv-transfer-config; kv_buffer_size and decoder_kv_blocks_ttl limit what is kept."""

    keep_while_draining_s: SecondsOrZero = 30.0
    """With --keep-for-next-turn: seconds for which a draining instance still keeps KV for next turns, so that these can
    fetch it. The instance is drained when all of it was fetched, or after this time. 0: the KV is released at once."""

    first_byte_timeout_s: Annotated[Seconds, heading("Router: time limits and retries")] = 60.0
    """Seconds, plus one for each 1000 bytes of the request, in which an instance must begin its answer if it makes no
    progress; the request then goes to another instance. Progress is bytes of any answer, and steps counted in the
    instance's /metrics, so that a long queue or a long prompt is waited for."""

    between_bytes_timeout_s: Seconds = 60.0
    """Seconds for which an instance may pause within an answer without making progress; the answer then ends with an
    error, unless another instance continues it."""

    answer_timeout_s: Seconds = 600.0
    """Maximum seconds to the first byte of an answer, and between two bytes, even if the instance makes progress."""

    health_interval_s: Seconds = 2.0
    """Seconds between two requests to an instance's /health."""

    health_timeout_s: Seconds = 3.0
    """Maximum seconds for an answer to /health. An instance that takes longer is avoided. After three times in a row it
    counts as down until it answers again, and requests that wait for it go to other instances."""

    retries: CountOrZero = 1
    """Number of other instances to try after one has failed a request, for prefill and for decode."""

    busy_wait_s: SecondsOrZero = 10.0
    """Maximum seconds, in sum, for which a request waits if every decode instance answers 429 or 503. Each wait is as
    long as `Retry-After` says. After that, the client gets the answer of the instance. 0: at once."""

    continuations: CountOrZero = 3
    """Number of times that a streamed answer may continue on another instance after its instance was lost. 0: never;
    the answer then ends with an error."""

    continuation_timeout_s: Seconds = 30.0
    """Maximum seconds to wait for an instance that can continue an answer."""

    release_timeout_s: Seconds = 5.0
    """Maximum seconds for a request to a prefill instance to free an abandoned hand-off."""

    max_in_flight: Annotated[Count, heading("Router: queue and memory")] = 2048
    """Maximum number of requests that are served at the same time. Further ones wait, and tenants take turns."""

    max_waiting: CountOrZero = 1024
    """Maximum number of requests that wait. If there are more, the last request of the tenant with the most waiting
    requests is answered with 429."""

    waiting_timeout_s: Seconds = 30.0
    """Maximum seconds for which a request waits to be served. After that, it is answered with 429."""

    max_body: str = "32MiB"
    """Maximum size of a request body. A larger one is answered with 413."""

    max_buffered: str = "1GiB"
    """Maximum bytes of request bodies in memory at the same time. Further requests are answered with 429."""

    tenant_by: Annotated[str, heading("Router: tenants")] = "key"
    """Distinction of tenants: key (the API key, or the client address if no keys are required), user (the `user`
    field of the body) or header:NAME. The last two are chosen by clients, so use them only for clients that you trust;
    a request without them counts by its key."""

    tenant_requests_per_minute: RateOrZero = 0.0
    """Requests per minute that a tenant may make; 0: any number. A further one is answered with 429."""

    tenant_tokens_per_minute: RateOrZero = 0.0
    """Tokens per minute that a tenant may request; 0: any number. A request counts the estimated tokens of its prompts,
    and the longest answers that it allows (max_tokens for each choice of each prompt; 1024 for a chat request without a
    limit). A further one is answered with 429."""

    tenant_max_in_flight: CountOrZero = 0
    """Requests of a tenant that are served at the same time; further ones wait without delaying other tenants. 0: no
    limit but --max-in-flight. With several workers, each one serves at least one."""

    tenants_file: Path | None = None
    """TOML file with limits of single tenants: a table for each, with weight (its share of turns when requests wait,
    default 1), requests_per_minute, tokens_per_minute, max_in_flight and api_key (a list of its keys). With --tenant-by
    user or header:NAME, the table is named after the tenant."""

    forward_path: Annotated[tuple[str, ...], heading("Router: what clients may ask for")] = ()
    """A method and a path that clients may use besides the OpenAI API's, such as 'POST /v1/audio/transcriptions';
    repeat it for more. All others are answered with 404."""

    trust_client_tickets: bool = False
    """Forward kv_transfer_params from clients to instances, which then fetch KV from the addresses in them. Only for a
    router whose clients are proxies of your own."""

    client_kv_keys: bool = False
    """Forward the keys of KV in clients' requests to instances (prefix_prompt_ids, kvcache_store_keys,
    kvcache_load_keys, kvcache_ttl_s, kvcache_wait_s), which store and load KV under them. Requests with another
    cache_salt have other keys."""

    max_stored_responses: Annotated[CountOrZero, heading("Router: stored responses")] = 10_000
    """Maximum number of responses (/v1/responses) that are stored for previous_response_id, by all workers together.
    The least recently used one is dropped first. 0: none is stored."""

    max_stored_bytes: str = "256MiB"
    """Maximum number of bytes of all stored responses, which are compressed."""

    stored_response_ttl_s: Seconds = 86400.0
    """Seconds for which a stored response is kept after its last use."""

    workers: Annotated[NumWorkers | None, heading("Router: processes and traces")] = None
    """Number of router processes that serve the port together; each takes at most one core. The limits on running and
    waiting requests and on memory are divided among them. Default: one; with `kvferry serve`, two if there are cores
    for them, so that the other one serves if one dies or hangs."""

    page: bool = True
    """Serve a page at `/` that shows the fleet, the last requests and the times of their phases. It needs the same key
    as /kvferry/*."""

    page_tick_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 2.0
    """Seconds between two updates of an open page."""

    max_decisions: Count = 512
    """Number of requests that /kvferry/decisions shows."""

    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans of each request and its legs are sent, such as http://127.0.0.1:4318/v1/traces. Needs
    kvferry[otel]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamo_python is not None and not self.dynamo_python.is_file():
            raise ConfigError(
                f"--dynamo-python {self.dynamo_python} is no program: there is no file, or a folder or pipe"
            )
        if len(self.bootstrap_port) > len(self.prefill_url):
            raise ConfigError(
                f"--bootstrap-port is given {len(self.bootstrap_port)} times for"
                f" {len(self.prefill_url)} --prefill-url; give it once for each, in the same order"
            )
        if self.disaggregate_from != "auto" and not re.fullmatch(r"[0-9]{1,9}", self.disaggregate_from):
            raise ConfigError(
                f"--disaggregate-from must be auto or a number of tokens, got {self.disaggregate_from[:32]!r}"
            )
        if self.tenant_by not in ("key", "user") and not re.fullmatch(f"header:{_HEADER_NAME}", self.tenant_by):
            raise ConfigError(f"--tenant-by must be key, user or header:NAME, got {self.tenant_by!r}")
        if not re.fullmatch(_HEADER_NAME, self.session_header):
            raise ConfigError(f"--session-header must be the name of a header, got {self.session_header[:80]!r}")
        for path in self.forward_path:
            parse_path(path)
        parse_bytes(self.max_stored_bytes, "--max-stored-bytes")
        if self.max_body_bytes < 1:
            raise ConfigError("--max-body must be more than 0 bytes")
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-buffered ({self.max_buffered}) must be at least --max-body ({self.max_body}),"
                " or the longest body is never admitted"
            )

    @property
    def fixed_threshold(self) -> int | None:
        """`disaggregate_from` as a number; None: it tunes itself."""
        return None if self.disaggregate_from == "auto" else int(self.disaggregate_from)

    @property
    def max_body_bytes(self) -> int:
        """`max_body` as a number."""
        return parse_bytes(self.max_body, "--max-body")

    @property
    def max_stored_responses_bytes(self) -> int:
        """`max_stored_bytes` as a number."""
        return parse_bytes(self.max_stored_bytes, "--max-stored-bytes")

    @property
    def tenant_header(self) -> bytes:
        """The header that names the tenant, in lower case; empty if none does."""
        return self.tenant_by.partition("header:")[2].lower().encode()

    @property
    def max_buffered_bytes(self) -> int:
        """`max_buffered` as a number."""
        return parse_bytes(self.max_buffered, "--max-buffered")
