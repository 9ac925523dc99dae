"""Tenants and their limits: shares, requests and tokens per minute, concurrent requests.

A tenant is an API key, or a client address if no keys are required; with `--tenant-by`, the value of `user` or of a
header. Owns each tenant's usage.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.core.settings.options import read_options
from kvferry.core.settings.toml_file import read_toml
from kvferry.http.headers import RawHeaders, find_header, require_key
from kvferry.router.body import RequestBody
from kvferry.router.config import RouterConfig
from kvferry.router.errors import OverLimit

_MAX_NAME = 256
_MAX_ANSWER_TOKENS, _MAX_ANSWERS = 10**7, 10**3
_MAX_NUMBER = 256
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class _Form:
    """The fields of a path's bodies: `texts` of the prompt, `limits` of the answer, and the tokens of an answer without
    a limit (`default_tokens`). Engines differ in the limit that they use, so the highest one counts. `prompts`: the
    field of one prompt or several; `conversations`: the field with a list of conversations."""

    texts: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    default_tokens: int = 0
    prompts: str = ""
    conversations: str = ""
    pairs: tuple[tuple[str, ...], tuple[str, ...]] | None = None


_CHAT_TEXTS = ("messages", "tools", "documents", "chat_template", "chat_template_kwargs")
_POOLED = _Form(_CHAT_TEXTS, prompts="input")
_IN_EACH_PAIR = ("instruction", "chat_template_kwargs")
_PAIRED = _Form(pairs=(("query", "queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2")))

_FORMS = {
    "/v1/completions": _Form(("suffix",), ("max_tokens",), 16, prompts="prompt"),  # 16 is the API's default
    "/v1/chat/completions": _Form(
        _CHAT_TEXTS,
        ("max_completion_tokens", "max_tokens"),
        1024,
    ),
    "/v1/chat/completions/batch": _Form(
        _CHAT_TEXTS, ("max_completion_tokens", "max_tokens"), 1024, conversations="messages"
    ),
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify"), _POOLED),
    "/v2/embed": _Form(("texts", "inputs", "images")),
    "/v1/audio/speech": _Form(("input", "instructions")),
    **dict.fromkeys(("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"), _PAIRED),
}

Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a tenant; 0: no limit. `weight`: its share of turns while requests wait. `api_key`: keys of this
    tenant, as with --api-key."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    requests_per_minute: Rate = 0.0
    tokens_per_minute: Rate = 0.0
    max_in_flight: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    api_key: list[str] = []


class Bucket:
    """A token bucket that holds the amount of a minute, and refills steadily."""

    minute_s = 60.0
    __slots__ = ("_capacity", "_level", "_since")

    def __init__(self, per_minute: float, now: float) -> None:
        self._capacity = self._level = per_minute
        self._since = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0: now. An amount above the capacity may be taken from a full bucket."""
        self._level = min(self._capacity, self._level + (now - self._since) * self._capacity / self.minute_s)
        self._since = now
        missing = min(amount, self._capacity) - self._level
        return max(0.0, missing * self.minute_s / self._capacity)

    def take(self, amount: float) -> None:
        """Take an amount, after `seconds_until`; a negative amount is refunded."""
        self._level = min(self._capacity, self._level - amount)


@dataclass(slots=True)
class Tenant:
    """A tenant. `requests` and `tokens` None: not limited."""

    key: bytes
    limits: Limits
    requests: Bucket | None = None
    tokens: Bucket | None = None

    @property
    def is_limited(self) -> bool:
        """True if its requests or tokens per minute are limited, so that each request is charged."""
        return self.requests is not None or self.tokens is not None


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of a request to its tenant."""

    tenant: Tenant
    tokens: float = 0.0

    def refund(self) -> None:
        """Refund the charge of a request that was refused for reasons other than its tenant's limits."""
        if self.tenant.requests is not None:
            self.tenant.requests.take(-1)
        if self.tenant.tokens is not None:
            self.tenant.tokens.take(-self.tokens)


@dataclass
class Tenants:
    """All tenants of a router."""

    clock: Clock
    limits: Limits
    named: Mapping[bytes, Limits] = field(default_factory=dict)
    """The limits of tenants, by the key that `find` derives from a name or an API key."""
    by: str = "key"
    max_tenants: int = 20_000
    """Maximum number of tenants whose rates are remembered; the least recently active is forgotten first."""
    _tenants: dict[bytes, Tenant] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RouterConfig, clock: Clock) -> Tenants:
        """Create the tenants from the configuration. Raises `ConfigError` if the file cannot be used."""
        limits = Limits(
            requests_per_minute=config.tenant_requests_per_minute,
            tokens_per_minute=config.tenant_tokens_per_minute,
            max_in_flight=config.tenant_max_in_flight,
        )
        limits_by_tenant = {} if config.tenants_file is None else read_tenants(config.tenants_file, limits)
        shares = {key: _share(tenant_limits, config.workers or 1) for key, tenant_limits in limits_by_tenant.items()}
        return cls(clock, _share(limits, config.workers or 1), shares, config.tenant_by)

    def __len__(self) -> int:
        """Number of tenants that are remembered."""
        return len(self._tenants)

    def api_keys(self) -> set[str]:
        """All API keys that belong to a tenant."""
        return {key for limits in self.named.values() for key in limits.api_key}

    def find(self, caller: bytes, headers: RawHeaders, body: RequestBody | bytes | None) -> Tenant:
        """The tenant of a request. `caller`: the digest of an accepted key, or an address."""
        key = caller
        if self.by != "key":
            key = self._header_value(headers, body) or caller
        tenant = self._tenants.get(key)
        return tenant if tenant is not None else self._new(key)

    def _header_value(self, headers: RawHeaders, body: RequestBody | bytes | None) -> bytes | None:
        if self.by == "user":
            user = body.get("user") if isinstance(body, RequestBody) else None
            return _name(user) if isinstance(user, str) and user else None
        value = find_header(headers, self.by.partition(":")[2].lower().encode())
        return _name(value.decode("latin-1")) if value else None

    def _new(self, key: bytes) -> Tenant:
        limits, now = self.named.get(key, self.limits), self.clock.monotonic()
        if len(self._tenants) >= self.max_tenants:
            del self._tenants[next(iter(self._tenants))]
        tenant = Tenant(
            key,
            limits,
            Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None,
            Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None,
        )
        self._tenants[key] = tenant
        return tenant

    def charge(self, tenant: Tenant, num_tokens: float) -> Charge:
        """Charge a request of `num_tokens`. Raises `OverLimit`, and charges nothing then."""
        now = self.clock.monotonic()
        self._tenants[tenant.key] = self._tenants.pop(tenant.key, tenant)
        for bucket, amount, unit in ((tenant.requests, 1.0, "requests"), (tenant.tokens, num_tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.seconds_until(amount, now)
            if wait_s > 0:
                per_minute = getattr(tenant.limits, f"{unit}_per_minute")
                raise OverLimit(
                    f"the limit of {per_minute:g} {unit} per minute is reached; try again in {math.ceil(wait_s)} s",
                    math.ceil(wait_s),
                )
        if tenant.requests is not None:
            tenant.requests.take(1.0)
        if tenant.tokens is not None:
            tenant.tokens.take(num_tokens)
        return Charge(tenant, num_tokens)


def count_tokens(body: RequestBody | bytes | None, path: str, bytes_per_token: float) -> float:
    """Number of tokens that a request is charged: an estimate for its prompts, and the longest answers that it allows.
    0 for paths without a model. Raises `InvalidRequest` for a limit that is not an integer."""
    form = _FORMS.get(path)
    if form is None or not isinstance(body, RequestBody):
        return 0.0
    num_tokens, num_prompts = sum(len(body.raw(field)) for field in form.texts) / bytes_per_token, 1
    if form.prompts:
        in_prompts, num_prompts = _measure_prompts(body.raw(form.prompts), bytes_per_token)
        num_tokens += in_prompts
    if form.conversations:
        num_prompts = _num_items(body.raw(form.conversations))
    if form.pairs is not None:
        num_tokens += _measure_pairs(body, *form.pairs) / bytes_per_token
    if not form.limits:
        return num_tokens
    limit = max(_integer(body, field) for field in form.limits)
    answer = min(limit if limit > 0 else form.default_tokens, _MAX_ANSWER_TOKENS)
    num_answers = min(max(_integer(body, "n"), _integer(body, "best_of"), 1), _MAX_ANSWERS)
    return num_tokens + answer * num_answers * num_prompts


def _measure_pairs(body: RequestBody, first: tuple[str, ...], second: tuple[str, ...]) -> float:
    """Bytes of all pairs of texts: a single first text is paired with each second text; several first texts are paired
    with one second text each. An engine reads only one of several synonymous fields, and the costliest choice
    counts."""
    in_each = sum(len(body.raw(field)) for field in _IN_EACH_PAIR)
    first_texts, second_texts = (
        [(len(raw), _num_items(raw)) for raw in map(body.raw, fields)] for fields in (first, second)
    )
    return max(
        num_bytes * (num_second if num_first == 1 else 1) + in_each * num_second + second_bytes
        for num_bytes, num_first in first_texts
        for second_bytes, num_second in second_texts
    )


def _num_items(raw: bytes) -> int:
    """The number of items of a JSON list; 1 for anything else, and for an empty list."""
    return max(1, len(_ITEMS.decode(raw))) if raw[:1] == b"[" else 1


def _measure_prompts(prompt: bytes, bytes_per_token: float) -> tuple[float, int]:
    """The estimated number of tokens, and the number of prompts, in the JSON of a text, texts, token ids, or lists of
    token ids. The JSON is not decoded, because it may be very long."""
    if prompt[:1] != b"[":
        return len(prompt) / bytes_per_token, 1
    if b'"' not in prompt:
        return prompt.count(b",") + 1, max(1, prompt.count(b"[") - 1)
    num_quotes = prompt.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"')
    return len(prompt) / bytes_per_token, num_quotes // 2


def _integer(body: RequestBody, field: str) -> int:
    """A field's integer, 0 if it is missing: some engines accept 8.0 and "8" as 8. Raises `InvalidRequest` for values
    that no engine accepts."""
    value, raw = body.get(field), body.raw(field)
    if value is None or isinstance(value, int):
        return int(value or 0)
    number = math.nan
    if isinstance(value, float | str) and len(raw) < _MAX_NUMBER:
        with suppress(ValueError):
            number = float(value)
    if not number.is_integer():
        raise InvalidRequest(f"{field} must be an integer, got {raw[:40].decode(errors='replace')}", param=field)
    return int(number)


def priority_of(body: RequestBody | bytes | None) -> int:
    """vLLM's field: lower comes first. If it is not a number, the instance refuses the request."""
    priority = body.get("priority") if isinstance(body, RequestBody) else None
    return priority if isinstance(priority, int) and not isinstance(priority, bool) else 0


def read_tenants(path: Path, limits: Limits) -> dict[bytes, Limits]:
    """Read a TOML file with a table for each tenant, with `limits` as defaults. Raises `ConfigError`."""
    try:
        tables = read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"--tenants-file {error}") from error
    tenants: dict[bytes, Limits] = {}
    for name, table in tables.items():
        tenant_limits = _read_table(path, name, table, limits)
        for key in (_name(name), *map(_digest, tenant_limits.api_key)):
            if key in tenants:
                raise ConfigError(f"--tenants-file {path}: a key of [{name}] also belongs to another tenant")
            tenants[key] = tenant_limits
    return tenants


def _share(limits: Limits, num_workers: int) -> Limits:
    """The limits of a tenant in one of several worker processes, among which the kernel spreads its connections. At
    least one request at a time, because a client of this process would otherwise wait forever."""
    return msgspec.structs.replace(
        limits,
        requests_per_minute=limits.requests_per_minute / num_workers,
        tokens_per_minute=limits.tokens_per_minute / num_workers,
        max_in_flight=limits.max_in_flight and max(1, limits.max_in_flight // num_workers),
    )


def _read_table(path: Path, name: str, table: Any, limits: Limits) -> Limits:
    where = f"--tenants-file {path}, [{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table; write the limits of a tenant below a line [{name}]")
    tenant_limits = read_options(Limits, {**msgspec.structs.asdict(limits), **table}, where)
    for key in tenant_limits.api_key:
        require_key(key, where)
    return tenant_limits


def _name(name: str) -> bytes:
    """The key of a tenant's name, in a form that no API key or address has."""
    return b"name " + name[:_MAX_NAME].encode("utf-8", "replace")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
