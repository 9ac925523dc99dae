"""A proxy for x prefill and y decode instances that share a KV store. It knows no tickets and nothing of kvferry: it
tokenizes a prompt, has a prefill instance store its KV under a key, and has a decode instance load it by the key.

    python examples/key_proxy.py --port 8000 --prefill http://127.0.0.1:8100 --prefill http://127.0.0.1:8101 \
        --decode http://127.0.0.1:8200 --decode http://127.0.0.1:8201

The instances are kvferry's or vLLM's, each with a `KVStoreConnector` (in vLLM `KvferryKVStoreConnector`) and the same
store. Both kinds are taken in turn; one that fails is passed over, and without any prefill instance a decode instance
computes the prompt. `test_key_proxy.py` runs it before real instances. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
TOKENIZED = ("model", "prompt", "messages", "tools", "documents", "add_special_tokens", "chat_template",
             "chat_template_kwargs", "add_generation_prompt", "continue_final_message")  # fmt: skip
"""Fields of a request that decide its tokens."""
FAILED = (ClientError, TimeoutError)


class RoundRobin:
    """Instances in turn; those that failed last come last."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls, self._turn = list(urls), itertools.count()
        self._failed: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        first = next(self._turn) % len(self._urls)
        turns = self._urls[first:] + self._urls[:first]
        yield from sorted(turns, key=lambda url: url in self._failed)

    def note(self, url: str, failed: bool) -> None:
        """Note whether an instance has just failed."""
        (self._failed.add if failed else self._failed.discard)(url)


class KeyProxy:
    """`timeout_s`: for a whole answer."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], timeout_s: float = 600.0) -> None:
        self._prefill, self._decode = RoundRobin(prefill), RoundRobin(decode)
        self._timeout = ClientTimeout(total=timeout_s, sock_connect=5)
        self._client: ClientSession | None = None

    def app(self) -> web.Application:
        """The application, which owns the client's connections."""
        app = web.Application(client_max_size=32 * 2**20)
        app.add_routes([web.post(path, self.serve) for path in PATHS])
        app.cleanup_ctx.append(self._with_client)
        return app

    async def _with_client(self, app: web.Application) -> Any:
        async with ClientSession(timeout=self._timeout) as self._client:
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one request: P first, then D with the key, if P has stored it."""
        body = await request.json()
        params = await self._store(request.path, body)
        if params is not None:
            body = {**body, "kv_transfer_params": params}
        for url in self._decode:
            response = web.StreamResponse()
            try:
                async with self._http.post(url + request.path, json=body) as answer:
                    if answer.status >= 500:
                        raise ClientConnectionError(f"{url} answers {answer.status}")
                    response.set_status(answer.status)
                    response.content_type = answer.content_type
                    if not body.get("stream"):
                        content = await answer.read()  # all of it, so that another D may still answer
                        self._decode.note(url, failed=False)
                        return web.Response(body=content, status=answer.status, content_type=answer.content_type)
                    async for chunk in answer.content.iter_any():
                        if not response.prepared:
                            await response.prepare(request)
                        await response.write(chunk)
                    await response.write_eof()
                    return response
            except FAILED:
                self._decode.note(url, failed=True)
                if response.prepared:
                    raise  # which cuts the client's stream: it must not look complete
        raise web.HTTPServiceUnavailable(text="no decode instance answers")

    @property
    def _http(self) -> ClientSession:
        assert self._client is not None, "the application is not running"
        return self._client

    async def _store(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Have a prefill instance store the prompt's KV. Returns what D is sent; None: nothing was stored."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
            return None  # several prompts: one instance serves them all
        for url in self._prefill:
            try:
                tokens = await self._tokenize(url, body)
                key = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
                stores = {"prefix_prompt_ids": tokens, "kvcache_store_keys": [key], "kvcache_load_keys": None}
                prefill = {**body, "max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": stores}
                prefill |= {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
                prefill |= {"min_tokens": 1} if body.get("min_tokens") else {}
                prefill.pop("stream_options", None)
                async with self._http.post(url + path, json=prefill) as answer:
                    await answer.read()
                    self._prefill.note(url, failed=answer.status >= 500)
                    if answer.status == 200:
                        return {**stores, "kvcache_store_keys": None, "kvcache_load_keys": [key], "kvcache_wait_s": 0}
                    if answer.status < 500:
                        return None  # the request is wrong, as D will say
            except FAILED:
                self._prefill.note(url, failed=True)
        return None

    async def _tokenize(self, url: str, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        asked = {name: body[name] for name in TOKENIZED if name in body}
        async with self._http.post(f"{url}/tokenize", json=asked) as answer:
            answer.raise_for_status()
            tokens: list[int] = (await answer.json())["tokens"]
            return tokens


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A round-robin proxy that hands KV over by keys.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, help="URL of a prefill instance")
    parser.add_argument("--decode", action="append", required=True, help="URL of a decode instance")
    given = parser.parse_args()
    web.run_app(KeyProxy(given.prefill, given.decode).app(), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
