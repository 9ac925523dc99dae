"""What an instance tells routers: only who knows the fleet's token can say it, and not for long."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.errors import AuthenticationFailed, LeaseEnded, ProtocolError
from kvferry.core.registration import SKEW_S, Announcement, registration_key, seal, unseal
from kvferry.http.keys import fleet_key

KEY = registration_key("token")
NOW = 1_700_000_000.0


def announced(**more: object) -> Announcement:
    fields = {"router": "r", "process": "p", "number": int(NOW * 1e9), "url": "http://127.0.0.1:1", "role": "decode"}
    return msgspec.convert({**fields, **more}, Announcement)


def test_what_was_sealed_is_read() -> None:
    said = announced(state="draining", bootstrap_port=8998)
    assert unseal(KEY, seal(KEY, said), NOW) == said


def test_only_the_token_seals() -> None:
    said = announced()
    for key in (registration_key("other"), b"", fleet_key("token").encode()):
        with pytest.raises(AuthenticationFailed, match="KVFERRY_AUTH_TOKEN"):
            unseal(KEY, seal(key, said), NOW)
    with pytest.raises(AuthenticationFailed):
        unseal(b"", seal(b"", said), NOW)  # a router without a token knows nobody


@pytest.mark.parametrize("change", [(b"decode", b"prefill"), (b"http://127.0.0.1:1", b"http://127.0.0.1:2")])
def test_nothing_of_it_can_be_changed(change: tuple[bytes, bytes]) -> None:
    message = seal(KEY, announced())
    assert change[0] in message
    with pytest.raises(AuthenticationFailed):
        unseal(KEY, message.replace(*change), NOW)


@pytest.mark.parametrize("late_s", [SKEW_S + 1, -SKEW_S - 1])
def test_it_does_not_hold_for_long(late_s: float) -> None:
    message = seal(KEY, announced())
    unseal(KEY, message, NOW + late_s * 0.9)
    with pytest.raises(LeaseEnded, match="clocks"):
        unseal(KEY, message, NOW + late_s)


@pytest.mark.parametrize(
    "message", [b"", b"[]", b"{}", b"\xff", b'{"announcement":{},"seal":1}', b'{"announcement":{},"seal":"","x":1}']
)
def test_what_is_no_message_is_an_error_that_says_so(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        unseal(KEY, message, NOW)


def test_a_sealed_message_of_another_form_is_refused() -> None:
    content = msgspec.json.encode({"router": "r"})
    message = msgspec.json.decode(seal(KEY, announced()))
    message["announcement"] = msgspec.Raw(content)
    with pytest.raises(AuthenticationFailed):
        unseal(KEY, msgspec.json.encode(message), NOW)
