"""Cross-origin requests of browsers (the CORS protocol of the Fetch standard): lets pages of other origins use the API.
Keys come in headers, so cookies are never allowed (`access-control-allow-credentials`)."""

from __future__ import annotations

from kvferry.http.headers import RawHeaders
from kvferry.http.origins import ANY_ORIGIN
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Handler

_MAX_AGE_S = 600


class Cors:
    """Answers preflights, and adds headers that let a page read other answers. Metrics and administration (/metrics,
    /kvferry/*) are never for pages."""

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    def admit(self, request: HttpRequest, response: Response) -> Handler | None:
        """Add headers to the answer if the page may read it. Return the handler of a preflight, which has no key and no
        route; None for other requests."""
        origin = request.first.get(b"origin")
        if origin is None or not self._origins or not _is_public(request.path):
            return None
        if (allowed := self._allowed(origin)) is not None:
            for header in allowed:
                response.add_header(*header)
        if request.method != "OPTIONS" or b"access-control-request-method" not in request.first:
            return None
        return _refuse if allowed is None else _allow

    def _allowed(self, origin: bytes) -> RawHeaders | None:
        expose = (b"access-control-expose-headers", b"*")
        if ANY_ORIGIN in self._origins:
            return [(b"access-control-allow-origin", b"*"), expose]
        if origin.decode("latin-1") not in self._origins:
            return None
        return [(b"access-control-allow-origin", origin), expose, (b"vary", b"origin")]


async def _allow(request: HttpRequest, response: Response) -> None:
    """Answer the preflight of an allowed page, for any method and headers."""
    headers = [
        (b"access-control-allow-methods", request.first[b"access-control-request-method"]),
        (b"access-control-max-age", b"%d" % _MAX_AGE_S),
    ]
    if (names := request.first.get(b"access-control-request-headers")) is not None:
        headers.append((b"access-control-allow-headers", names))
    response.send(204, b"", headers)


async def _refuse(request: HttpRequest, response: Response) -> None:
    """Answer the preflight of a page that is not allowed."""
    response.send(400, b"Disallowed CORS origin", [(b"content-type", b"text/plain; charset=utf-8")])


def _is_public(path: str) -> bool:
    return path != "/metrics" and not path.startswith("/kvferry/")
