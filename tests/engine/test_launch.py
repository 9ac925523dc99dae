"""The engine's thread: requests from asyncio, leaving early, refusals, failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import InvalidRequest, LeakError, QueueFull, RequestAborted, Unavailable
from kvferry.core.messages.hand_off import Produce
from kvferry.core.messages.instance_facts import InstanceFacts, TicketKinds
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.launch import AsyncEngine
from kvferry.router.protocols.choose import can_pair


@asynccontextmanager
async def serving(
    model: Any, transfer: KVTransferConfig | None = None, kind: type[Engine] = Engine, **settings: Any
) -> AsyncIterator[AsyncEngine]:
    defaults = {"dtype": "float32", "device": "cpu", "block_size": 8, "kv_cache_memory": "16MiB", "max_num_seqs": 8}
    engine = AsyncEngine(kind(EngineConfig(model=str(model), **{**defaults, **settings}), transfer), ["m"])
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def request(name: str, max_tokens: int = 8, **settings: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **settings)
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)


async def tokens_of(engine: AsyncEngine, wanted: Request) -> list[int]:
    return [token async for output in engine.generate(wanted) for token in output.token_ids]


async def test_many_at_once_get_the_tokens_of_one_alone(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        alone = await tokens_of(engine, request("alone"))
        together = await asyncio.gather(*(tokens_of(engine, request(str(number))) for number in range(20)))
        assert len(alone) == 8
        assert together == [alone] * 20
        await engine.check()


@pytest.mark.parametrize(
    ("connector", "told"),
    [(None, TicketKinds()), ("P2pConnector", TicketKinds(writes=("p2p",), reads=("p2p",)))],
)
async def test_it_tells_routers_how_it_hands_off(model_maker: Any, connector: str | None, told: TicketKinds) -> None:
    transfer = None if connector is None else KVTransferConfig(kv_connector=connector)
    async with serving(model_maker("llama"), transfer) as engine:
        about = msgspec.json.decode(msgspec.json.encode(engine.describe()), type=InstanceFacts)
        assert about.tickets == told
        assert about.can_serve_as("decode") is (connector is not None)


@pytest.mark.parametrize(("connector", "fits"), [("KVStoreConnector", True), ("P2pConnector", False)])
async def test_a_router_pairs_it_with_who_reads_its_tickets(
    model_maker: Any, tmp_path: Path, connector: str, fits: bool
) -> None:
    async def facts(connector: str, folder: str) -> InstanceFacts:
        extra = {"store": f"file:{tmp_path / folder}"} if connector == "KVStoreConnector" else {}
        transfer = KVTransferConfig(kv_connector=connector, kv_connector_extra_config=extra)
        async with serving(model_maker("llama"), transfer) as engine:
            return msgspec.json.decode(msgspec.json.encode(engine.describe()), type=InstanceFacts)

    prefill, decode = await facts("KVStoreConnector", "here"), await facts(connector, "there")
    assert can_pair(prefill, decode) is can_pair(decode, prefill) is fits


async def test_leaving_early_frees_the_blocks(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        async with aclosing(engine.generate(request("a", max_tokens=2000))) as outputs:
            async for _ in outputs:
                with pytest.raises(LeakError):
                    engine.engine.pool.check()
                break
        await engine.check()
        assert (await engine.statistics()).scheduler.num_running == 0
        engine.engine.pool.check()


async def test_a_cancelled_task_frees_the_blocks(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        started = asyncio.Event()

        async def watch() -> None:
            async for _ in engine.generate(request("a", max_tokens=2000)):
                started.set()

        task = asyncio.create_task(watch())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.statistics()).scheduler.num_running == 0
        engine.engine.pool.check()


async def test_who_leaves_in_the_moment_of_admission_has_left(model_maker: Any) -> None:
    """The cancellation comes between the engine's answer and the caller's waking up to it."""
    async with serving(model_maker("llama")) as engine:
        loop, add, added = asyncio.get_running_loop(), engine.engine.add, threading.Event()
        task: asyncio.Task[list[int]]

        def adding(wanted: Request) -> None:
            add(wanted)
            engine._calls.appendleft(added.set)  # runs once the caller's answer is on its way

        engine.engine.add = adding  # type: ignore[method-assign]
        task = asyncio.create_task(tokens_of(engine, request("a", max_tokens=2000)))
        loop.call_soon(added.wait)
        loop.call_soon(loop.call_soon, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.statistics()).scheduler.num_running == 0
        engine.engine.pool.check()


async def test_refusals_reach_the_caller(model_maker: Any) -> None:
    async with serving(model_maker("llama"), max_waiting=1) as engine:
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await tokens_of(
                engine, Request(request_id="a", prompt_token_ids=[10**9], sampling=SamplingParams(max_tokens=1))
            )
        wanted = request("b")
        wanted.hand_off = Produce("t")
        with pytest.raises(InvalidRequest, match="has no connector"):
            await tokens_of(engine, wanted)
        results = await asyncio.gather(
            *(tokens_of(engine, request(str(number), max_tokens=200)) for number in range(30)), return_exceptions=True
        )
        assert any(isinstance(result, QueueFull) for result in results)
        assert any(isinstance(result, list) for result in results)


async def test_a_request_id_used_twice_is_served_twice(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        both = await asyncio.gather(tokens_of(engine, request("same")), tokens_of(engine, request("same")))
        assert both[0] == both[1]


async def test_closing_ends_whoever_still_waits(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        outputs = engine.generate(request("a", max_tokens=4000))
        await anext(outputs)
        closing = asyncio.create_task(engine.close())
        with pytest.raises(Unavailable, match="shutting down"):
            async for _ in outputs:
                pass
        await closing
        with pytest.raises(Unavailable):
            await tokens_of(engine, request("b"))


class BrokenEngine(Engine):
    def step(self) -> list[EngineOutput]:
        raise RuntimeError("out of cheese")


async def test_a_failed_step_is_everybodys_answer(model_maker: Any) -> None:
    async with serving(model_maker("llama"), kind=BrokenEngine) as engine:
        with pytest.raises(Unavailable, match="out of cheese"):
            await tokens_of(engine, request("a"))
        assert not engine.healthy


async def test_an_operator_aborts_requests_by_the_names_that_clients_know(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        begun: dict[str, asyncio.Event] = {name: asyncio.Event() for name in ("cmpl-a-0", "chatcmpl-b", "cmpl-ab")}

        async def run(name: str) -> int:
            num_tokens = 0
            async for output in engine.generate(request(name, max_tokens=400)):
                num_tokens += len(output.token_ids)
                begun[name].set()
            return num_tokens

        tasks = {name: asyncio.create_task(run(name)) for name in begun}
        await asyncio.gather(*(event.wait() for event in begun.values()))
        assert engine.abort_requests(["x", "chatcmpl"]) == 0
        assert engine.abort_requests(["a", "chatcmpl-b"]) == 2
        for name in ("cmpl-a-0", "chatcmpl-b"):
            with pytest.raises(RequestAborted):
                await tasks[name]
        assert not tasks["cmpl-ab"].done()
        assert engine.abort_requests([]) == 1
        with pytest.raises(RequestAborted):
            await tasks["cmpl-ab"]
        await engine.check()


async def test_a_reset_cache_has_nothing_and_tells_what_is_in_use(model_maker: Any) -> None:
    async with serving(model_maker("llama")) as engine:
        prompt = Request(
            request_id="p", prompt_token_ids=[*range(1, 40)], sampling=SamplingParams(max_tokens=2, temperature=0.0)
        )
        await tokens_of(engine, prompt)
        assert (await engine.statistics()).blocks.num_cached > 0
        assert await engine.reset_prefix_cache()
        assert (await engine.statistics()).blocks.num_cached == 0
        async with aclosing(engine.generate(request("running", max_tokens=400))) as outputs:
            async for output in outputs:
                if len(output.token_ids) and (await engine.statistics()).blocks.num_cached:
                    assert not await engine.reset_prefix_cache()
                    break
        assert await engine.reset_prefix_cache()
        await engine.check()
