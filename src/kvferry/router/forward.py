"""Everything that is not split: the request goes to one instance as it is, and the answer comes back as it is."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from kvferry.core.errors import PeerLost, Unavailable
from kvferry.router.errors import InstanceLost, UnknownPath, Unreachable
from kvferry.router.exchange import Services
from kvferry.router.gateway import ClientRequest
from kvferry.router.headers import REQUEST_ID, for_instance
from kvferry.router.instance import Instance
from kvferry.router.reply import Reply
from kvferry.router.upstream import Answer

_OWN_PATHS = "/kvferry"


class Forward:
    """Serves any path by a decode instance; what only asks, and finds none, by a prefill instance."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def handle(self, request: ClientRequest, reply: Reply) -> None:
        """See `gateway.Handler`."""
        path = posixpath.normpath("/" + request.path.lstrip("/"))
        if path == _OWN_PATHS or path.startswith(_OWN_PATHS + "/"):
            raise UnknownPath(f"{request.path} is between the router and its instances")
        answer = await self._ask_around(request)
        try:
            await reply.relay(answer)
        finally:
            answer.close()

    async def _ask_around(self, request: ClientRequest) -> Answer:
        """The first answer there is. A request that may have been begun is repeated only if it changes nothing."""
        headers = for_instance(request.headers, [(REQUEST_ID, request.request_id)])
        body = request.body if request.body or request.method not in _READS else None
        for instance in self._candidates(request):
            try:
                return await self._services.upstream.open(instance, request.method, request.target, headers, body)
            except PeerLost as error:
                unreachable = isinstance(error, Unreachable)
                self._services.metrics.leg_failed(instance, "unreachable" if unreachable else "lost")
                if not unreachable and request.method not in _READS:
                    raise InstanceLost("the instance broke off before it answered") from error
        raise Unavailable("no instance can be reached; try again later")

    def _candidates(self, request: ClientRequest) -> Iterator[Instance]:
        pools = self._services.pools
        tried: set[Instance] = set()
        for pool in (pools.decode, pools.prefill) if request.method in _READS else (pools.decode,):
            while (instance := pool.pick(tried)) is not None:
                tried.add(instance)
                yield instance


_READS = frozenset({"GET", "HEAD", "OPTIONS"})
