"""JSON that the processes of one deployment send each other over HTTP."""

from __future__ import annotations

import msgspec


class PeerMessage(msgspec.Struct, frozen=True):
    """Base of these messages. While a release is rolled out, sender and receiver may be of different releases: a
    receiver ignores fields that it does not know, and a field that is added has a default, the behaviour without it.
    A sender enforces what it reports, as its receiver may not know all of it.

    Bodies and files that people write forbid unknown fields instead, so that a misspelled name is an error.
    """
