"""The form without tickets: P stores the KV under a key of the request's, in a store that D loads it from by this key
(`core.messages.kv_keys`). So P and D need not reach each other, only a common store.

P's answer ends when its KV is stored, and so D is called after it, and waits for nothing. D samples the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.core.messages.kv_keys import LOAD_FIELD, STORE_FIELD, TTL_FIELD, WAIT_FIELD
from kvferry.router.protocols.form import Form

PROTOCOL = "keys"
KEY_TTL_S = 600.0
"""Seconds after which the key of a hand-off expires: it is of no use after the request. The blocks stay."""


def keys(transfer_id: str) -> Form:
    """The transfer id is the key."""
    return Form(
        protocol=PROTOCOL,
        transfer_id=transfer_id,
        produce={STORE_FIELD: [transfer_id], TTL_FIELD: KEY_TTL_S},
        early={LOAD_FIELD: [transfer_id], WAIT_FIELD: 0.0},
        early_is_all=True,
        released_by="nobody",
    )


def with_client_keys(form: Form, client: Mapping[str, msgspec.Raw]) -> Form:
    """The same hand-off with the client's own keys (by field): P stores and loads under them. In a hand-off by keys, D
    loads by those that P stores under."""
    if not client or form.uses_rendezvous:
        return form
    produce: dict[str, Any] = {**form.produce, **client}
    early = form.early
    if form.protocol == PROTOCOL and _names_any(client.get(STORE_FIELD)):
        if TTL_FIELD not in client:
            del produce[TTL_FIELD]
        early = {**(early or {}), LOAD_FIELD: client[STORE_FIELD]}
    elif form.protocol == PROTOCOL:
        produce[STORE_FIELD] = form.produce[STORE_FIELD]
    return msgspec.structs.replace(form, produce=produce, early=early)


def _names_any(field: msgspec.Raw | None) -> bool:
    return field is not None and bytes(field).strip() not in (b"null", b"[]", b"[null]")
