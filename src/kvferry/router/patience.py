"""How long a request waits for instances that have no room. Owns what it has waited so far."""

from __future__ import annotations

import asyncio

from kvferry.core.openai import RETRY_AFTER_HEADER, RETRY_AFTER_S
from kvferry.http.headers import RawHeaders, find_header
from kvferry.router.legs import Verdict, verdict
from kvferry.router.upstream import Answer

_LEAST_S = 0.1
"""Who says 0 is not asked without end."""

_RETRY_AFTER = RETRY_AFTER_HEADER.lower().encode()


class Patience:
    """Of one request; seconds."""

    def __init__(self, most_s: float) -> None:
        self._left_s = most_s

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait."""
        return self._left_s <= 0

    async def waited(self, answer: Answer) -> bool:
        """Whether `answer` is one of load that asks for no more than is left; it is then closed, and the time over."""
        wait_s = retry_after_s(answer.headers)
        if verdict(answer.status) is not Verdict.BUSY or wait_s > self._left_s:
            return False
        self._left_s -= wait_s
        answer.close()
        await asyncio.sleep(wait_s)
        return True


def retry_after_s(headers: RawHeaders) -> float:
    """What an answer of load asks to wait; a date, or what cannot be read, is as if it were silent."""
    told = find_header(headers, _RETRY_AFTER) or b""
    return max(_LEAST_S, float(told) if told.isdigit() and len(told) < 9 else float(RETRY_AFTER_S))
