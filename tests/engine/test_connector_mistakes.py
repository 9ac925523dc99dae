"""What the docstring of `SchedulerSide` says of methods that raise by mistake, beyond the steps of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvferry.core.errors import Unavailable
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.launch import AsyncEngine
from kvferry.transport.shared_memory import owned_segment_names
from support.mistaken_connector import CLOSED, FAILING

MISTAKEN = KVTransferConfig(kv_connector="MistakenConnector", kv_connector_module_path="support.mistaken_connector")


@pytest.fixture
async def engine(model_maker: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=str(model_maker("llama")), dtype="float32", device="cpu", block_size=8, kv_cache_memory="16MiB"
    )
    engine = AsyncEngine(Engine(config, MISTAKEN, auth_token="secret"), ["m"])
    engine.start()
    yield engine
    await engine.close()


@pytest.fixture(autouse=True)
def _no_mistakes() -> Iterator[None]:
    """Mistakes are of one test."""
    CLOSED.clear()
    yield
    FAILING.clear()


async def _answer(engine: AsyncEngine, name: str) -> list[int]:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)
    return [token async for output in engine.generate(request) for token in output.token_ids]


@pytest.mark.parametrize("name", ["statistics", "check", "release"])
async def test_who_asks_gets_the_error_and_serving_goes_on(engine: AsyncEngine, name: str) -> None:
    before = await _answer(engine, "before")
    call = {"statistics": engine.statistics, "check": engine.check, "release": lambda: engine.release("t")}[name]
    FAILING.add(name)
    with pytest.raises(KeyError, match="a mistake"):
        await call()
    FAILING.clear()
    assert await _answer(engine, "after") == before
    assert engine.healthy


async def test_what_raises_while_the_engine_ends_leaves_nothing_else_open(model_maker: Any) -> None:
    """The first error is raised, when all parts are closed."""
    config = EngineConfig(model=str(model_maker("llama")), dtype="float32", device="cpu", kv_cache_memory="16MiB")
    names = owned_segment_names()
    engine = Engine(config, MISTAKEN, auth_token="secret")
    FAILING.add("close")
    assert owned_segment_names() != names
    with pytest.raises(KeyError, match="worker side"):
        engine.close()
    assert CLOSED == ["worker side", "scheduler side"]
    assert owned_segment_names() == names


async def test_a_side_that_cannot_say_whether_it_has_work_ends_the_engine(engine: AsyncEngine) -> None:
    FAILING.add("has_work")
    with suppress(Unavailable):  # it is asked between two steps, and after the last
        await _answer(engine, "a")
    await engine.failed()
    assert not engine.healthy
    with pytest.raises(Unavailable, match="a mistake"):
        await _answer(engine, "b")
