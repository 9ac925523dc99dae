"""Settings of the router. A field's docstring is its flag's help; flags, TOML and environment come from this class."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_bytes
from kvferry.router.paths import parse_path

HandOffMode = Literal["auto", "sequential", "concurrent"]
ProtocolName = Literal["auto", "kvferry", "nixl", "mooncake", "sglang"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router: the instances behind it, how requests are handed off, and its bounds."""

    prefill_url: tuple[str, ...] = ()
    """Base URL of a prefill instance; repeat it for more. Without any, decode instances do everything."""

    decode_url: tuple[str, ...] = ()
    """Base URL of a decode instance; repeat it for more."""

    instances_file: Path | None = None
    """File with the instances, a line each: 'prefill URL' or 'decode URL'. It is followed: who is new is added, and who
    is no longer there is drained, then forgotten."""

    hand_off: HandOffMode = "auto"
    """When decode is called: sequential, after prefill has answered; concurrent, at the same time; auto,
    concurrent between kvferry's own instances that offer it. Between vLLM servers with kvferry's connectors, concurrent
    leaves usage without the number of cached tokens."""

    protocol: ProtocolName = "auto"
    """What prefill and decode instances speak. auto: each is asked what it is. kvferry: kvferry's own instances.
    nixl: vLLM servers whose prefill answers with what decode then fetches (NixlConnector, kvferry's connectors in
    vLLM). mooncake: vLLM servers with MooncakeConnector, called both at once. sglang: SGLang servers started with
    --disaggregation-mode, called both at once."""

    bootstrap_port: tuple[int, ...] = ()
    """Port of a prefill instance's bootstrap server (Mooncake's in vLLM, SGLang's), in the order of --prefill-url; 8998
    when not given."""

    policy: str = "cost"
    """Who chooses the instances of a request: cost (least predicted time), prefix, session, least_loaded,
    power_of_two, round_robin, random, an entry point of the group kvferry.policies, or module:Class."""

    policy_option: tuple[str, ...] = ()
    """A setting of the policy's own, as in pressure=0.05; repeat it for more."""

    disaggregate_from: str = "auto"
    """From how many tokens that are not cached a prompt is computed on a prefill instance; a shorter one goes straight
    to decode. auto: tuned by what is measured, and a busy prefill pool is passed over too. 0: always."""

    session_header: str = "X-Session-Id"
    """Header by which clients name a conversation; else their `user` field does."""

    prefix_index_entries: int = 400_000
    """Most prefixes that are remembered of all instances together; about 150 bytes each."""

    instance_kv_events: tuple[str, ...] = ()
    """Where a vLLM server publishes its KV events (--kv-events-config), and where it tells them again, as in
    http://10.0.0.1:8000=tcp://10.0.0.1:5557,tcp://10.0.0.1:5558; repeat it for more. kvferry's instances say so
    themselves. Needs kvferry[events]."""

    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans of each request and its legs are sent, as http://127.0.0.1:4318/v1/traces. Needs
    kvferry[otel]."""

    max_decisions: int = 512
    """How many requests /kvferry/decisions remembers."""

    retries: int = 1
    """Other instances tried when one fails a request, for prefill and for decode."""

    continuations: int = 3
    """How often a streamed answer whose instance is lost in the middle goes on at another; kvferry's instances only.
    0: never, the answer then ends with an error."""

    continuation_timeout_s: float = 30.0
    """Seconds to look for an instance that can go on with an answer, where none is left at once."""

    busy_wait_s: float = 10.0
    """Seconds a request may wait, in all, where every decode instance answers 429 or 503; each time for as long as
    `Retry-After` says. The answer is then the client's. 0: at once."""

    max_in_flight: int = 2048
    """Most requests at once; more wait for their turn."""

    max_waiting: int = 1024
    """Most requests that wait for their turn; one more is answered with 429."""

    waiting_timeout_s: float = 30.0
    """Seconds a request may wait for its turn; it is then answered with 429."""

    max_body: str = "32MiB"
    """Longest request body; a longer one is answered with 413."""

    max_buffered: str = "1GiB"
    """Most bytes of request bodies held at once; beyond it, requests are answered with 429."""

    connect_timeout_s: float = 5.0
    """Seconds to wait for a connection to an instance."""

    first_byte_timeout_s: float = 60.0
    """Seconds an instance may let a request wait for its answer without a sign of work, and 1 more for each 1000 bytes
    of the request; it then goes to another instance. Signs of work are bytes of any answer, and steps counted at the
    instance's /metrics, so that a long queue or a long prompt is waited for."""

    between_bytes_timeout_s: float = 60.0
    """Seconds an instance may stop in the middle of an answer without a sign of work; the answer then ends with an
    error, unless it goes on elsewhere."""

    answer_timeout_s: float = 600.0
    """Most seconds to the first byte of an answer, and between two, whatever the signs of work."""

    health_interval_s: float = 2.0
    """Seconds between two looks at an instance's /health."""

    health_timeout_s: float = 3.0
    """Seconds /health may take. An instance that is later than that is avoided; after three times in a row it counts
    as dead until it answers again, and requests that wait for it go elsewhere."""

    release_timeout_s: float = 5.0
    """Seconds that telling a prefill instance to free an abandoned hand-off may take."""

    forward_path: tuple[str, ...] = ()
    """A method and a path that clients may use beside the OpenAI API's, as in 'POST /v1/audio/transcriptions'; repeat
    it for more. Everything else is answered with 404."""

    trust_client_tickets: bool = False
    """Let clients' kv_transfer_params through to instances, which then fetch from where these say. Only for a router
    whose clients are proxies of your own."""

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ConfigError(f"--max-in-flight must be at least 1, got {self.max_in_flight}")
        if len(self.bootstrap_port) > len(self.prefill_url):
            raise ConfigError(
                f"--bootstrap-port is given {len(self.bootstrap_port)} times for"
                f" {len(self.prefill_url)} --prefill-url; give it once for each, in the same order"
            )
        for port in self.bootstrap_port:
            if not 0 < port <= 65535:
                raise ConfigError(f"--bootstrap-port must be between 1 and 65535, got {port}")
        for name in ("prefix_index_entries", "max_decisions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.disaggregate_from != "auto" and not self.disaggregate_from.isdecimal():
            raise ConfigError(f"--disaggregate-from must be auto or a number of tokens, got {self.disaggregate_from!r}")
        if self.retries < 0:
            raise ConfigError(f"--retries must not be negative, got {self.retries}")
        if self.continuations < 0:
            raise ConfigError(f"--continuations must not be negative, got {self.continuations}")
        if self.max_waiting < 0:
            raise ConfigError(f"--max-waiting must not be negative, got {self.max_waiting}")
        for path in self.forward_path:
            parse_path(path)
        if self.busy_wait_s < 0:
            raise ConfigError(f"--busy-wait-s must not be negative, got {self.busy_wait_s}")
        for name in (one.name for one in fields(self) if one.name.endswith("_s") and one.name != "busy_wait_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
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
    def max_buffered_bytes(self) -> int:
        """`max_buffered` as a number."""
        return parse_bytes(self.max_buffered, "--max-buffered")
