"""POST /v1/completions and /v1/chat/completions: plan the legs, call them, stream the answer."""

from __future__ import annotations

import asyncio

from kvferry.core.errors import RequestError
from kvferry.router.body import RequestBody
from kvferry.router.exchange import Exchange, Services
from kvferry.router.forward import Forward
from kvferry.router.gateway import ClientRequest
from kvferry.router.hand_off import split, whole
from kvferry.router.plan import Split, make_plan
from kvferry.router.reply import Reply
from kvferry.router.upstream import Answer


class Completions:
    """Serves requests that may be split."""

    def __init__(self, services: Services, forward: Forward) -> None:
        self._services, self._forward = services, forward

    async def handle(self, request: ClientRequest, reply: Reply) -> None:
        """See `gateway.Handler`."""
        body = RequestBody.parse(request.body)
        if body is None:  # Not ours to read; an instance knows what to say of it.
            await self._forward.handle(request, reply)
            return
        exchange = Exchange(self._services, request, body)
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve(exchange, reply, group)
                exchange.close()
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange, reply: Reply, group: asyncio.TaskGroup) -> None:
        try:
            answer = await self._answer(exchange, group)
        except RequestError as error:
            await reply.fail(error)
            return
        if await reply.relay(answer) and answer.status < 400:
            exchange.delivered()
            await exchange.let_legs_end()

    async def _answer(self, exchange: Exchange, group: asyncio.TaskGroup) -> Answer:
        plan = make_plan(exchange.request.path, exchange.body, self._services.pools)
        if isinstance(plan, Split):
            return await split(exchange, group)
        self._services.metrics.served("whole", plan.reason)
        return await whole(exchange)
