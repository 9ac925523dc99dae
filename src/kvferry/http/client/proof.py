"""A server's proof, on one connection, that it holds the deployment's secret.

An address outlives the process that listened there: another server that gets the port, or the pod's IP address, of a
dead instance would otherwise get its requests.
"""

from __future__ import annotations

import asyncio

from kvferry.core import entropy
from kvferry.core.errors import AuthenticationFailed, QueueFull, TransferError
from kvferry.core.keys import CHALLENGE_PATH, Signer
from kvferry.http.client.connection import AnswerHead, ClientConnection, OutgoingRequest
from kvferry.http.errors import AnswerTimeout, Overloaded
from kvferry.http.headers import request_line

_NOT_PROVEN = "it is not a server of kvferry's, or has no token"


class TokenProof:
    """The challenge on each new connection, before any request, to a server that has proved once that it holds
    `secret`. `base_path` precedes the path on the way to the server; `timeout_s`: seconds that its answer may take."""

    def __init__(self, secret: str, base_path: str, timeout_s: float = 30.0) -> None:
        self._secret, self._base_path, self._timeout_s = secret, base_path, timeout_s

    async def demand(self, connection: ClientConnection, server: str) -> Signer:
        """Demand the proof, and return the signer of requests to the server; the connection is then as new. Raises
        `AuthenticationFailed`, `Overloaded` if the server is overloaded, or the `TransferError` that ended the
        connection, which is closed in each case."""
        nonce = entropy.token_hex(16)
        line = request_line("GET", f"{self._base_path}{CHALLENGE_PATH}?nonce={nonce}")
        exchange = _Exchange(b"%bhost: %b\r\n\r\n" % (line, server.partition("://")[2].encode()))
        try:
            async with asyncio.timeout(self._timeout_s):
                connection.begin(exchange)
                head, body = await exchange.answer
            if head.status == QueueFull.status or head.status >= 500:
                raise Overloaded(f"{server} answers {head.status}")
            if head.status != 200 or not head.keep_alive:
                raise AuthenticationFailed(_NOT_PROVEN)
            signer = Signer(self._secret, nonce, body)
        except TimeoutError as error:
            connection.close()
            raise AnswerTimeout(f"{server} proved nothing within {self._timeout_s:g} s", "connection") from error
        except BaseException:
            connection.close()
            raise
        connection.call, connection.num_calls, connection.is_proven = None, 0, True
        return signer


class _Exchange:
    """A request whose answer is awaited on its connection. `answer`: the head and body, or the `TransferError`."""

    max_answer = 4096

    def __init__(self, data: bytes) -> None:
        self.request = OutgoingRequest((data,), 0.0, repeatable=False, bodiless=False)
        self.answer: asyncio.Future[tuple[AnswerHead, bytes]] = asyncio.get_running_loop().create_future()
        self._body = b""

    def receive(self, head: AnswerHead, payload: bytes, num_bytes: int, complete: bool) -> None:
        """Called by the connection."""
        self._body += payload
        if len(self._body) > self.max_answer:
            if not self.answer.done():
                self.answer.set_exception(AuthenticationFailed(_NOT_PROVEN))
        elif complete and not self.answer.done():
            self.answer.set_result((head, self._body))

    def lose(self, error: TransferError) -> None:
        """Called by the connection."""
        if not self.answer.done():
            self.answer.set_exception(error)
