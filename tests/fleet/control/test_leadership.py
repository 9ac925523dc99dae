"""A leadership that ends when it is not renewed in time."""

from __future__ import annotations

from kvferry.fleet.control.leadership import BELIEVED_S, RENEWED_S, TAKEN_S, TimedLeadership


class Kept(TimedLeadership):
    """Acquired and renewed by the test's clock."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now)

    async def try_acquire(self) -> bool:
        self._renewed(self.now)
        return True

    async def renew(self) -> None:
        self._renewed(self.now)

    async def release(self) -> None:
        await self._stop()

    async def remove(self) -> None:
        await self._stop()


async def test_it_is_held_for_less_time_than_others_wait() -> None:
    kept = Kept()
    assert not kept.is_held
    assert await kept.try_acquire()
    kept.now += BELIEVED_S - 0.01
    assert kept.is_held
    kept.now += 0.01
    assert not kept.is_held
    assert RENEWED_S < BELIEVED_S < TAKEN_S


async def test_a_renewal_counts_from_when_it_was_sent() -> None:
    kept = Kept()
    await kept.try_acquire()
    kept.now += 8.0
    await kept.renew()
    kept.now += 8.0
    assert kept.is_held


async def test_what_is_released_is_not_held() -> None:
    kept = Kept()
    await kept.try_acquire()
    await kept.release()
    assert not kept.is_held
    await kept.heartbeat()
    assert not kept.is_held, "a heartbeat does not take it again"
