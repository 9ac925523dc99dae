"""How long a request waits for instances that are full. Owns how long it has waited so far."""

from __future__ import annotations

import asyncio

from kvferry.core.openai import RETRY_AFTER_HEADER, RETRY_AFTER_S
from kvferry.http.headers import RawHeaders, find_header
from kvferry.router.legs import verdict
from kvferry.router.upstream import UpstreamAnswer

_LEAST_S = 0.1
"""Who says 0 is not asked without end."""

_RETRY_AFTER = RETRY_AFTER_HEADER.lower().encode()


class Patience:
    """Of one request; in seconds."""

    def __init__(self, most_s: float) -> None:
        self._left_s = most_s

    @property
    def is_over(self) -> bool:
        """Whether the request may not wait any longer."""
        return self._left_s <= 0

    async def waited(self, answer: UpstreamAnswer) -> bool:
        """Wait as long as `answer` (429 or 503) asks, after closing it. False if that is longer than what is left, or
        the answer has another status."""
        wait_s = retry_after_s(answer.headers)
        if verdict(answer.status) != "busy" or wait_s > self._left_s:
            return False
        self._left_s -= wait_s
        answer.close()
        await asyncio.sleep(wait_s)
        return True


def retry_after_s(headers: RawHeaders) -> float:
    """How long an answer of 429 or 503 asks to wait; a date, or a value that cannot be read, counts as missing."""
    told = find_header(headers, _RETRY_AFTER) or b""
    return max(_LEAST_S, float(told) if told.isdigit() and len(told) < 9 else float(RETRY_AFTER_S))
