"""A TCP proxy that misbehaves on demand, for what networks do to connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

CHUNK_BYTES = 64 * 2**10


class FlakyLink:
    """Listens on `port` and passes everything on to `upstream_port`, both on 127.0.0.1, as long as it is allowed to."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.delay_s = 0.0
        """For how long each chunk is on its way; both ways alike."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flaky-link")
        self._thread.start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._corrupt = 0
        self._server = self._call(self._listen)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        self._flowing = asyncio.Event()
        self._flowing.set()
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def cut(self) -> None:
        """Every connection breaks."""
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self._writers])

    def stall(self) -> None:
        """Nothing gets through until `resume`."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def resume(self) -> None:
        """It flows again."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def corrupt(self) -> None:
        """One bit of what passes next is turned."""
        self._corrupt += 1

    def close(self) -> None:
        """End everything."""

        async def end() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, make: Callable[[], object]) -> object:
        future: Future[object] = asyncio.run_coroutine_threadsafe(make(), self._loop)  # type: ignore[arg-type]
        return future.result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(OSError):
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
                self._writers.add(up_writer)
                try:
                    await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
                finally:
                    self._writers.discard(up_writer)
                    up_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await self._flowing.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._corrupt:
                self._corrupt -= 1
                chunk = chunk[:-1] + bytes([chunk[-1] ^ 1])
            writer.write(chunk)
            await writer.drain()
        writer.transport.abort()


@contextmanager
def flaky_link(upstream_port: int) -> Iterator[FlakyLink]:
    """One that is closed in the end."""
    link = FlakyLink(upstream_port)
    try:
        yield link
    finally:
        link.close()
