import asyncio
import threading

import pytest

from kvferry.core.errors import LeakError
from kvferry.transport.transfer_loop import TransferLoop


def test_coroutines_run_on_its_thread() -> None:
    loop = TransferLoop("kvferry-test")
    loop.start()

    async def where() -> str:
        return threading.current_thread().name

    assert loop.submit(where()).result(10) == "kvferry-test"
    loop.close()


def test_close_ends_every_task() -> None:
    loop = TransferLoop("kvferry-test")
    loop.start()
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = loop.submit(forever())
    loop.submit(asyncio.sleep(0)).result(10)
    loop.close()
    loop.close()
    assert ended.is_set()
    assert future.cancelled()
    loop.call(lambda: None)


def test_a_task_that_does_not_end_is_named() -> None:
    loop = TransferLoop("kvferry-test")
    loop.start()
    stubborn = threading.Event()
    begun = threading.Event()

    async def hang() -> None:
        begun.set()
        stubborn.wait()

    future = loop.submit(hang())
    begun.wait()
    with pytest.raises(LeakError, match="did not end"):
        loop.close(timeout_s=0.05)
    stubborn.set()
    loop.close()
    assert future.done()


def test_a_mistake_in_a_call_is_counted_and_ends_nothing_else() -> None:
    loop = TransferLoop("kvferry-test")
    loop.start()
    loop.call(lambda: 1 // 0)
    loop.submit(asyncio.sleep(0)).result(10)
    assert loop.num_errors == 1
    loop.close()
