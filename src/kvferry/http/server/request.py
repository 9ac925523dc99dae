"""A request as a handler sees it."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote

import msgspec

from kvferry.core.entropy import secret_hex
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.openai import REQUEST_ID_HEADER, sane_request_id
from kvferry.http.headers import RawHeaders
from kvferry.http.server.body import Body

_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_MAX_PARAMETERS, _MAX_DIGITS = 16, 9


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request. `name`: the digest of the presented key if it is one of this server's, otherwise the
    address. `is_known`: the `Authorization` header is for this server, and is not forwarded; `is_signed`: it is the
    signature of a process of the deployment; `is_operator`: it is an admin key, or an operator's signature."""

    name: bytes
    is_known: bool = False
    is_signed: bool = False
    is_operator: bool = False


class HttpRequest(msgspec.Struct, eq=False):
    """A request. `target`: path and query as they came, in origin form; `path`: decoded; `rest`: the part of the path
    after the prefix of a prefix route. `id` names the request in logs and in the answer, and a handler may set it.
    `arrived`: when the header was complete, in seconds of the event loop's clock. `client`: an address without a port;
    `first`: the first value of each header. `caller`: set before the handler is called. `opens`: it is the first
    request of its connection."""

    method: str
    target: str
    path: str
    headers: RawHeaders
    first: dict[bytes, bytes]
    body: Body
    id: str
    client: str
    caller: Caller
    arrived: float
    rest: str = ""
    opens: bool = False

    @property
    def query(self) -> str:
        """The part after the question mark, not decoded."""
        return self.target.partition("?")[2]

    def parameter(self, name: str, default: str = "") -> str:
        """The query parameter of this name. Raises `InvalidRequest` if it is given twice, which two readers could
        understand differently, or if there are too many parameters."""
        query = self.query
        if not query:
            return default
        try:
            values = parse_qs(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS).get(name, [default])
        except ValueError as error:
            raise InvalidRequest(f"the query has more than {_MAX_PARAMETERS} parameters") from error
        if len(values) > 1:
            raise InvalidRequest(f"{name} is given {len(values)} times; give it once", param=name)
        return values[0]

    def number(self, name: str, default: int) -> int:
        """The number in a parameter of the query. Raises `InvalidRequest` for anything else, and for one above 10⁹."""
        text = self.parameter(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise InvalidRequest(f"{name} must be a number, as in ?{name}=100", param=name)
        return int(text)

    def header(self, name: str) -> str | None:
        """The first header of that name, whatever its case; None when there is none."""
        value = self.first.get(name.lower().encode("latin-1"))
        return None if value is None else value.decode("latin-1")


def path_of(target: str) -> str:
    """The decoded path of a target in origin form."""
    path = target.partition("?")[0] if "?" in target else target
    return unquote(path) if "%" in path else path


def id_of(first: dict[bytes, bytes]) -> str:
    """The id that the client gives its request, if it is usable, or a new one."""
    request_id = first.get(_REQUEST_ID)
    return secret_hex() if request_id is None else sane_request_id(request_id.decode("latin-1"))
