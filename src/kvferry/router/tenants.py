"""Whose request it is, and what each tenant may have: shares, requests and tokens a minute, requests at a time.

A tenant is an API key, or an address where no keys are asked for; by `--tenant-by` also what clients write into `user`
or a header. Owns what each has used of its rates.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.http.headers import RawHeaders, find_header
from kvferry.router.body import RequestBody
from kvferry.router.config import RouterConfig
from kvferry.router.errors import OverLimit

MOST_TENANTS = 20_000
"""Whose rates are remembered; who has used least recently what he may is forgotten first, and begins anew."""

_MINUTE_S = 60.0
_LONGEST_NAME = 256
_MOST_ANSWER_TOKENS, _MOST_ANSWERS = 10**7, 10**3
_LONGEST_NUMBER = 256


@dataclass(frozen=True, slots=True)
class _Form:
    """Of one path's bodies: the fields with text that goes into the prompt, those that limit the answer, and how many
    tokens an answer counts that no field limits. Engines differ in which limit counts, so the highest does."""

    texts: tuple[str, ...]
    limits: tuple[str, ...]
    unsaid_tokens: int


_FORMS = {
    "/v1/completions": _Form(("suffix",), ("max_tokens",), 16),  # the API's default; `prompt` may be token ids
    "/v1/chat/completions": _Form(
        ("messages", "tools", "documents", "chat_template", "chat_template_kwargs"),
        ("max_completion_tokens", "max_tokens"),
        1024,
    ),
    "/v1/responses": _Form(("input", "instructions", "tools"), ("max_output_tokens",), 1024),
    "/v1/messages": _Form(("messages", "system", "tools"), ("max_tokens",), 1024),
}

Rate = Annotated[float, msgspec.Meta(ge=0)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one tenant; 0: no limit. `weight`: its share among those that wait. `api_key`: keys of this tenant."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    requests_per_minute: Rate = 0.0
    tokens_per_minute: Rate = 0.0
    max_in_flight: Annotated[int, msgspec.Meta(ge=0)] = 0
    api_key: list[str] = []


class Bucket:
    """Holds what may be used within a minute, and fills up steadily."""

    __slots__ = ("_level", "_most", "_since")

    def __init__(self, per_minute: float, now: float) -> None:
        self._most = self._level = per_minute
        self._since = now

    def lacking_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0: now. More than there ever is may be taken when it is full."""
        self._level = min(self._most, self._level + (now - self._since) * self._most / _MINUTE_S)
        self._since = now
        missing = min(amount, self._most) - self._level
        return max(0.0, missing * _MINUTE_S / self._most)

    def take(self, amount: float) -> None:
        """After `lacking_s`; a negative amount is given back."""
        self._level = min(self._most, self._level - amount)


@dataclass(slots=True)
class Tenant:
    """One of them. `requests` and `tokens` None: not limited."""

    key: bytes
    limits: Limits
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was charged."""

    tenant: Tenant
    tokens: float = 0.0

    def give_back(self) -> None:
        """The request was refused for reasons that are not its tenant's."""
        if self.tenant.requests is not None:
            self.tenant.requests.take(-1)
        if self.tenant.tokens is not None:
            self.tenant.tokens.take(-self.tokens)


_FREE = Charge(Tenant(b"", Limits()))


@dataclass
class Tenants:
    """All of a router's."""

    clock: Clock
    limits: Limits
    named: Mapping[bytes, Limits] = field(default_factory=dict)
    """By what `find` makes of a name or a key."""
    by: str = "key"
    _known: dict[bytes, Tenant] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RouterConfig, clock: Clock) -> Tenants:
        """Raises `ConfigError` for a file that cannot be used."""
        limits = Limits(
            requests_per_minute=config.tenant_requests_per_minute,
            tokens_per_minute=config.tenant_tokens_per_minute,
            max_in_flight=config.tenant_max_in_flight,
        )
        named = {} if config.tenants_file is None else read_tenants(config.tenants_file, limits)
        shares = {key: _share(one, config.workers) for key, one in named.items()}
        return cls(clock, _share(limits, config.workers), shares, config.tenant_by)

    def find(self, caller: bytes, headers: RawHeaders, body: RequestBody | bytes | None) -> Tenant:
        """Whose request that is. `caller`: the digest of an accepted key, or an address."""
        key = caller
        if self.by != "key":
            key = self._said(headers, body) or caller
        tenant = self._known.get(key)
        return tenant if tenant is not None else self._new(key)

    def _said(self, headers: RawHeaders, body: RequestBody | bytes | None) -> bytes | None:
        if self.by == "user":
            user = body.get("user") if isinstance(body, RequestBody) else None
            return _name(user) if isinstance(user, str) and user else None
        said = find_header(headers, self.by.partition(":")[2].lower().encode())
        return _name(said.decode("latin-1")) if said else None

    def _new(self, key: bytes) -> Tenant:
        limits, now = self.named.get(key, self.limits), self.clock.monotonic()
        if len(self._known) >= MOST_TENANTS:
            del self._known[next(iter(self._known))]
        tenant = Tenant(
            key,
            limits,
            Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None,
            Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None,
        )
        self._known[key] = tenant
        return tenant

    def charge(self, tenant: Tenant, num_tokens: float) -> Charge:
        """One request of so many tokens. Raises `OverLimit`, and takes nothing then."""
        if tenant.requests is None and tenant.tokens is None:
            return _FREE
        now = self.clock.monotonic()
        self._known[tenant.key] = self._known.pop(tenant.key, tenant)
        for bucket, amount, what in ((tenant.requests, 1.0, "requests"), (tenant.tokens, num_tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.lacking_s(amount, now)
            if wait_s > 0:
                per_minute = getattr(tenant.limits, f"{what}_per_minute")
                raise OverLimit(
                    f"the limit of {per_minute:g} {what} a minute is reached; try again in {math.ceil(wait_s)} s",
                    math.ceil(wait_s),
                )
        if tenant.requests is not None:
            tenant.requests.take(1.0)
        if tenant.tokens is not None:
            tenant.tokens.take(num_tokens)
        return Charge(tenant, num_tokens)


def count_tokens(body: RequestBody | bytes | None, path: str, bytes_per_token: float) -> float:
    """What a request counts for: its prompts, about, and the longest answers that it allows. 0 where nothing is
    generated. Raises `InvalidRequest` for a limit that is no integer."""
    form = _FORMS.get(path)
    if form is None or not isinstance(body, RequestBody):
        return 0.0
    num_tokens, num_prompts = sum(len(body.raw(field)) for field in form.texts) / bytes_per_token, 1
    if path == "/v1/completions":
        in_prompts, num_prompts = _measure_prompts(body.raw("prompt"), bytes_per_token)
        num_tokens += in_prompts
    limit = max(_integer(body, field) for field in form.limits)
    answer = min(limit if limit > 0 else form.unsaid_tokens, _MOST_ANSWER_TOKENS)
    num_answers = min(max(_integer(body, "n"), _integer(body, "best_of"), 1), _MOST_ANSWERS)
    return num_tokens + answer * num_answers * num_prompts


def _measure_prompts(prompt: bytes, bytes_per_token: float) -> tuple[float, int]:
    """How many tokens, about, and how many prompts: the JSON of a text, texts, token ids, or lists of token ids, which
    may be too long to be decoded for this."""
    if prompt[:1] != b"[":
        return len(prompt) / bytes_per_token, 1
    if b'"' not in prompt:
        return prompt.count(b",") + 1, max(1, prompt.count(b"[") - 1)
    num_quotes = prompt.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"')
    return len(prompt) / bytes_per_token, num_quotes // 2


def _integer(body: RequestBody, field: str) -> int:
    """A field's number, 0 when it is missing: 8, 8.0 and "8" are the same to some engines. Raises `InvalidRequest` for
    what is none to any."""
    value, raw = body.get(field), body.raw(field)
    if value is None or isinstance(value, int):
        return int(value or 0)
    number = math.nan
    if isinstance(value, float | str) and len(raw) < _LONGEST_NUMBER:
        with suppress(ValueError):
            number = float(value)
    if not number.is_integer():
        raise InvalidRequest(f"{field} must be an integer, got {raw[:40].decode(errors='replace')}", param=field)
    return int(number)


def priority_of(body: RequestBody | bytes | None) -> int:
    """vLLM's: what is lower comes first. An instance refuses what is no number."""
    found = body.get("priority") if isinstance(body, RequestBody) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def read_tenants(path: Path, limits: Limits) -> dict[bytes, Limits]:
    """A TOML file with a table for each tenant: what it does not say is as in `limits`. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--tenants-file {path}: {getattr(error, 'strerror', None) or error}") from error
    found: dict[bytes, Limits] = {}
    for name, table in tables.items():
        own = _read_table(path, name, table, limits)
        for key in (_name(name), *map(_digest, own.api_key)):
            if key in found:
                raise ConfigError(f"--tenants-file {path}: a key of [{name}] is another tenant's too")
            found[key] = own
    return found


def _share(limits: Limits, num_workers: int) -> Limits:
    """What one of several processes of a router lets a tenant have: the kernel spreads its connections among them. Of
    requests at a time at least one, or who comes to this process would wait for ever."""
    return msgspec.structs.replace(
        limits,
        requests_per_minute=limits.requests_per_minute / num_workers,
        tokens_per_minute=limits.tokens_per_minute / num_workers,
        max_in_flight=limits.max_in_flight and max(1, limits.max_in_flight // num_workers),
    )


def _read_table(path: Path, name: str, table: Any, limits: Limits) -> Limits:
    try:
        given = msgspec.convert(table, dict[str, Any])
        return msgspec.convert({**msgspec.structs.asdict(limits), **given}, Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--tenants-file {path}, [{name}]: {error}") from error


def _name(name: str) -> bytes:
    """Told apart from keys and addresses."""
    return b"name " + name[:_LONGEST_NAME].encode("utf-8", "replace")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
