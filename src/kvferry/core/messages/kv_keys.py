"""`KVTransferParams`: keys under which the KV of a prompt is stored and loaded, as they travel in a request.

The fields are named as in vLLM's pull request 12957, in `kv_transfer_params` or at the top of a request's body:

| field | meaning |
|---|---|
| `prefix_prompt_ids` | token ids of the prompt's prefix that the keys are of; null: the whole prompt |
| `kvcache_store_keys` | keys under which the prefix's KV is stored |
| `kvcache_load_keys` | keys under which KV of the prompt was stored |

and kvferry's own, in the same places:

| field | meaning |
|---|---|
| `kvcache_ttl_s` | seconds after which the stored keys expire; at most the connector's `key_ttl_s`, its default |
| `kvcache_wait_s` | seconds to wait for missing load keys; at most the connector's `key_wait_s`, its default |

Each of the first three is null, a list, or, for several prompts in one request, a list with null or a list for each
prompt. A null among the keys stands for a key that is not needed. The keys of a prompt divide the prefix's full
blocks evenly, in order: one key names all of them, and as many keys as blocks name one block each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.settings.bounds import MAX_SECONDS

MAX_KEY_BYTES = 1024
"""Longest key, in UTF-8."""
MAX_KEYS = 16_384
"""Max keys of one prompt: enough for a quarter of a million tokens in blocks of 16."""
MAX_PREFIX_TOKENS = 2**22

STORE_FIELD, LOAD_FIELD, PREFIX_FIELD = "kvcache_store_keys", "kvcache_load_keys", "prefix_prompt_ids"
TTL_FIELD, WAIT_FIELD = "kvcache_ttl_s", "kvcache_wait_s"
KEY_FIELDS = (PREFIX_FIELD, STORE_FIELD, LOAD_FIELD, TTL_FIELD, WAIT_FIELD)
"""All fields about keys."""

Keys = tuple[str | None, ...]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one prompt. `tenant`: the name space of its keys, the client's `cache_salt`."""

    prefix_prompt_ids: Sequence[int] | None = None
    kvcache_store_keys: Keys = ()
    kvcache_load_keys: Keys = ()
    kvcache_ttl_s: float | None = None
    kvcache_wait_s: float | None = None
    tenant: str = ""

    @property
    def stores(self) -> bool:
        """True if the prompt's KV is to be stored under keys."""
        return any(key is not None for key in self.kvcache_store_keys)

    @property
    def loads(self) -> bool:
        """True if KV may be loaded under keys."""
        return any(key is not None for key in self.kvcache_load_keys)

    def num_prefix_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        """The length of the prefix. Raises `InvalidRequest` if the prompt does not begin with `prefix_prompt_ids`."""
        prefix = self.prefix_prompt_ids
        if prefix is None:
            return len(prompt_token_ids)
        if list(prompt_token_ids[: len(prefix)]) != list(prefix):
            same = num_equal(prefix, prompt_token_ids)
            raise InvalidRequest(
                f"{PREFIX_FIELD} must be the prompt's first tokens; the prompt has {len(prompt_token_ids)} and differs"
                f" from token {same} on",
                param=PREFIX_FIELD,
            )
        return len(prefix)


def num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of elements, from the first on, that are the same in both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def parse_transfer_params(
    params: Mapping[str, Any] | None, body: Mapping[str, Any], *, num_prompts: int, tenant: str = ""
) -> list[KVTransferParams | None]:
    """Read the keys of each prompt: from `kv_transfer_params`, and from fields of the same names at the top of the
    `body`. None: the prompt has no keys.

    Raises `InvalidRequest` that names the field: for a wrong type, for too many keys or a key that is too long, and for
    a field that has different values in both places.
    """
    values = {field: _one_value(field, (params or {}).get(field), body.get(field)) for field in KEY_FIELDS}
    if all(value is None for value in values.values()):
        return [None] * num_prompts
    ttl_s, wait_s = _seconds(TTL_FIELD, values[TTL_FIELD], above=True), _seconds(WAIT_FIELD, values[WAIT_FIELD])
    prefixes, stores, loads = (
        _by_prompt(field, values[field], num_prompts) for field in (PREFIX_FIELD, STORE_FIELD, LOAD_FIELD)
    )
    all_keys = [
        KVTransferParams(
            prefix_prompt_ids=_token_ids(prefix),
            kvcache_store_keys=_keys(STORE_FIELD, store),
            kvcache_load_keys=_keys(LOAD_FIELD, load),
            kvcache_ttl_s=ttl_s,
            kvcache_wait_s=wait_s,
            tenant=tenant,
        )
        for prefix, store, load in zip(prefixes, stores, loads, strict=True)
    ]
    return [keys if keys.stores or keys.loads or keys.prefix_prompt_ids is not None else None for keys in all_keys]


def shares(num_blocks: int, num_keys: int) -> list[tuple[int, int]]:
    """The blocks `[first, last)` that each key of a prompt names. With more keys than blocks, several keys name the
    same block; if the prompt has no full block, they name none."""
    bounds = [(num_blocks * index // num_keys, num_blocks * (index + 1) // num_keys) for index in range(num_keys)]
    return [(first, max(last, min(first + 1, num_blocks))) for first, last in bounds]


def _one_value(field: str, in_params: Any, in_body: Any) -> Any:
    if in_params is not None and in_body is not None and in_params != in_body:
        raise InvalidRequest(f"{field} is given twice, with different values: at the top and in kv_transfer_params",
                             param=field)  # fmt: skip
    return in_body if in_params is None else in_params


def _by_prompt(field: str, value: Any, num_prompts: int) -> list[list[Any]]:
    if value is None:
        return [[]] * num_prompts
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{field} must be a list or null, got {_kind(value)}", param=field)
    if any(isinstance(entry, list | tuple) for entry in value):
        if not all(entry is None or isinstance(entry, list | tuple) for entry in value):
            raise InvalidRequest(f"{field} must have a list or null for each prompt, or none", param=field)
        if len(value) != num_prompts:
            raise InvalidRequest(
                f"{field} has {len(value)} lists; it must have one for each of {num_prompts} prompts", param=field
            )
        return [list(entry or ()) for entry in value]
    if all(entry is None for entry in value):
        return [[]] * num_prompts
    if num_prompts > 1:
        raise InvalidRequest(
            f"{field} must have a list or null for each prompt, since the request has {num_prompts}", param=field
        )
    return [list(value)]


def _token_ids(prefix: list[Any]) -> tuple[int, ...] | None:
    if not prefix:
        return None
    if len(prefix) > MAX_PREFIX_TOKENS:
        raise InvalidRequest(
            f"{PREFIX_FIELD} has {len(prefix)} token ids; at most {MAX_PREFIX_TOKENS} are accepted", param=PREFIX_FIELD
        )
    for index, token in enumerate(prefix):
        if type(token) is not int or not 0 <= token < 2**31:
            raise InvalidRequest(f"{PREFIX_FIELD}[{index}] must be a token id, got {_kind(token)}", param=PREFIX_FIELD)
    return tuple(prefix)


def _keys(field: str, keys: list[Any]) -> Keys:
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"{field} has {len(keys)} keys; at most {MAX_KEYS} are accepted", param=field)
    for index, key in enumerate(keys):
        if key is None:
            continue
        if not isinstance(key, str):
            raise InvalidRequest(f"{field}[{index}] must be a string or null, got {_kind(key)}", param=field)
        if not 0 < len(key.encode("utf-8", "surrogatepass")) <= MAX_KEY_BYTES:
            raise InvalidRequest(f"{field}[{index}] must have 1 to {MAX_KEY_BYTES} bytes in UTF-8", param=field)
    return tuple(keys)


def _seconds(field: str, value: Any, *, above: bool = False) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{field} must be a number of seconds, got {_kind(value)}", param=field)
    if not 0 <= value <= MAX_SECONDS or (above and not value):
        raise InvalidRequest(
            f"{field} must be {'more than' if above else 'at least'} 0 and at most {MAX_SECONDS:g}", param=field
        )
    return float(value)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", dict: "an object"}
    return "null" if value is None else names.get(type(value), "an array")
