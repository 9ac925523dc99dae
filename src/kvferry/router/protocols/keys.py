"""The form without tickets: P stores the KV under a key of the request, and D loads it by this key
(`core.messages.kv_keys`). P and D need not reach each other, only a common store.

P's answer ends when its KV is stored. D is called after it, does not wait, and samples the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.core.messages.kv_keys import LOAD_FIELD, STORE_FIELD, TTL_FIELD, WAIT_FIELD
from kvferry.router.protocols.form import Form

PROTOCOL = "keys"
KEY_TTL_S = 600.0
"""Seconds after which the key of a hand-off expires, since it is useless after the request. The blocks stay."""


def keys(transfer_id: str) -> Form:
    """Make the form with the transfer id as the key."""
    return Form(
        protocol=PROTOCOL,
        transfer_id=transfer_id,
        produce={STORE_FIELD: [transfer_id], TTL_FIELD: KEY_TTL_S},
        early={LOAD_FIELD: [transfer_id], WAIT_FIELD: 0.0},
        early_is_final=True,
        released_by=None,
    )


def with_client_keys(form: Form, client: Mapping[str, msgspec.Raw]) -> Form:
    """Add the client's own keys (by field) to a form: P stores and loads under them. In a hand-off by keys, D loads by
    the keys under which P stores."""
    if not client or form.uses_rendezvous:
        return form
    produce: dict[str, Any] = {**form.produce, **client}
    early = form.early
    if form.protocol == PROTOCOL and _has_keys(client.get(STORE_FIELD)):
        if TTL_FIELD not in client:
            del produce[TTL_FIELD]
        early = {**(early or {}), LOAD_FIELD: client[STORE_FIELD]}
    elif form.protocol == PROTOCOL:
        produce[STORE_FIELD] = form.produce[STORE_FIELD]
    return msgspec.structs.replace(form, produce=produce, early=early)


def _has_keys(field: msgspec.Raw | None) -> bool:
    return field is not None and bytes(field).strip() not in (b"null", b"[]", b"[null]")
