"""Lets a running instance compute documents once and keep their KV, and reports the result of each.

Speaks HTTP only: `/tokenize` makes a document's tokens; `/kvferry/kept` reports how many of its blocks are in the
store, and pins and unpins them; a completion of one token computes the missing ones. The progress that is shown is the
number of blocks in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from kvferry.cli.cache.documents import Document
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import KvferryError
from kvferry.core.messages.kept import KeptBlocks, TierShare
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.server.response import JSON

ASK_S = 60.0


class NotWarmed(KvferryError):
    """The KV of a document cannot be stored. Other documents may still be."""


class PathNotServed(NotWarmed):
    """The server does not have this path."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one document. `num_blocks`: number of its blocks; `num_before`: blocks that were in every tier
    before; `num_kept`: blocks that are in every tier now."""

    document: str
    error: str | None = None
    num_tokens: int = 0
    num_blocks: int = 0
    num_before: int = 0
    num_kept: int = 0
    num_pinned: int = 0
    tiers: tuple[TierShare, ...] = ()


# The server.

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Server:
    """One instance, or a router."""

    max_answer: ClassVar[int] = 2**30

    client: SignedClient
    url: str

    async def ask(
        self, method: str, path: str, body: object, answer_type: type[Answer], timeout_s: float = ASK_S
    ) -> Answer:
        """The answer. Raises `NotWarmed` with the server's error, and `TransferError` if it does not answer."""
        sent = None if body is None else msgspec.json.encode(body)
        status, _, content = await self.client.ask(
            Origin.parse(self.url.rstrip("/")),
            method,
            path,
            purpose="operate",
            timeout_s=timeout_s,
            headers=[JSON],
            body=sent,
            max_bytes=self.max_answer,
        )
        if status != 200:
            raise (PathNotServed if status == 404 else NotWarmed)(_error_message(self.url, status, content))
        try:
            return msgspec.json.decode(content, type=answer_type)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NotWarmed(f"{self.url} gave an answer to {path} that cannot be read: {error}") from error


def _error_message(url: str, status: int, content: bytes) -> str:
    try:
        message = msgspec.json.decode(content)["error"]["message"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    return f"{url} answered {status}: {message}"


async def find_instances(server: Server) -> list[Server]:
    """The server itself or, behind a router, its prefill instances, which can keep KV. Raises `NotWarmed`."""
    try:
        reply = await server.ask("GET", "/kvferry/instances", None, dict[str, list[dict[str, Any]]])
    except PathNotServed:
        return [server]
    shown = [
        instance
        for instance in reply.get("instances", [])
        if instance.get("engine") in ("kvferry", None) and instance.get("role") == "prefill"
    ]
    ready = [instance for instance in shown if instance.get("alive") and not instance.get("draining")]
    if not ready:
        raise NotWarmed(f"the router at {server.url} has no prefill instance of kvferry's that is serving")
    if any("url" not in instance for instance in ready):
        raise NotWarmed(
            f"the router at {server.url} shows its instances' addresses to operators only: give --admin-key, or, if the"
            " router was started without one, the --url of a prefill instance"
        )
    return [Server(server.client, instance["url"]) for instance in ready]


# The work.

OnProgress = Callable[[str, int, int], None]
"""Document, blocks that are kept, blocks in all."""


async def warm_all(
    instances: Sequence[Server],
    documents: Iterable[Document],
    *,
    pin: bool | None,
    cache_salt: str | None,
    timeout_s: float,
    on_progress: OnProgress,
    on_outcome: Callable[[Outcome], None],
) -> None:
    """Warm every document on one of the instances. Each instance computes one document at a time. `pin` None: unpin
    every document on all instances, because it is not known which one pinned it. Raises `ConfigError` for a document
    that cannot be read."""
    left = iter(documents)

    async def work(instance: Server) -> None:
        for document in left:  # the instances share one iterator; nothing is awaited while the next document is taken
            warming = Warming(instance, document, cache_salt, timeout_s, on_progress)
            on_outcome(await warming.run(pin=bool(pin)))

    if pin is None:
        for document in left:
            each = (Warming(instance, document, cache_salt, timeout_s, on_progress) for instance in instances)
            on_outcome(_worst_outcome(await asyncio.gather(*(warming.unpin() for warming in each))))
        return
    tasks = [asyncio.create_task(work(instance)) for instance in instances]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Warming:
    """One document on one instance."""

    max_tries = 3
    """Maximum number of attempts for a document if the store drops some of its blocks."""
    stalled_s = 10.0
    """After these seconds without new blocks, no more are expected."""
    poll_interval_s = 0.25

    def __init__(
        self, instance: Server, document: Document, cache_salt: str | None, timeout_s: float, on_progress: OnProgress
    ) -> None:
        self._instance, self._document, self._timeout_s = instance, document, timeout_s
        self._salt = document.body.get("cache_salt") or cache_salt
        self._on_progress = on_progress
        self._tokens: list[int] = []

    async def run(self, *, pin: bool) -> Outcome:
        """Warm the document. Returns the result, which also has the document's errors."""
        name = self._document.name
        try:
            async with asyncio.timeout(self._timeout_s):
                self._tokens = await self._tokenize()
                before = await self._fetch_kept()
                if not before.num_blocks:
                    raise NotWarmed(f"it has {before.num_tokens} tokens, less than a block of KV ({before.block_size})")
                after = before if _is_complete(before) else await self._fill(before)
                if pin and after.is_complete:
                    after = await self._fetch_kept(pin=True)
        except TimeoutError:
            return Outcome(document=name, error=f"not kept within {self._timeout_s:g} s; raise --timeout-s")
        except KvferryError as error:
            return Outcome(document=name, error=str(error))
        return self._outcome(before, after, pin)

    async def unpin(self) -> Outcome:
        """Let the document's blocks be evicted again. Returns the result, which also has the document's errors."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._tokens = await self._tokenize()
                after = await self._fetch_kept(pin=False)
        except TimeoutError:
            return Outcome(document=self._document.name, error=f"not unpinned within {self._timeout_s:g} s")
        except KvferryError as error:
            return Outcome(document=self._document.name, error=str(error))
        ill = [tier.tier for tier in after.tiers if not tier.is_healthy]
        return Outcome(
            document=self._document.name,
            error=f"tier {', '.join(ill)} does not answer, and may have it pinned" if ill else None,
            num_tokens=after.num_tokens,
            num_blocks=after.num_blocks,
            num_before=after.num_present,
            num_kept=after.num_present,
            tiers=tuple(after.tiers),
        )

    async def _tokenize(self) -> list[int]:
        prompt = self._document.body.get("prompt")
        if isinstance(prompt, list):
            return _token_ids(prompt)
        body = {key: value for key, value in self._document.body.items() if key != "cache_salt"}
        answer = await self._instance.ask("POST", "/tokenize", body, dict[str, Any])
        return _token_ids(answer.get("tokens"))

    async def _fetch_kept(self, *, pin: bool | None = None) -> KeptBlocks:
        body = {"tokens": self._tokens, **({} if pin is None else {"pin": pin}), **self._salted()}
        try:
            blocks = await self._instance.ask("POST", "/kvferry/kept", body, KeptBlocks)
        except PathNotServed as error:
            raise NotWarmed(
                f"{self._instance.url} is not an instance of kvferry's engine; only those report what they keep"
            ) from error
        self._on_progress(self._document.name, blocks.num_present, blocks.num_blocks)
        return blocks

    async def _fill(self, blocks: KeptBlocks) -> KeptBlocks:
        """Compute the document until all tiers have all its blocks, or no more blocks arrive."""
        for _ in range(self.max_tries):
            before = blocks
            blocks = await self._compute()
            if _is_complete(blocks) or _num_held(blocks) <= _num_held(before):
                break
        return blocks

    async def _compute(self) -> KeptBlocks:
        """Compute the document once. Returns when the store has all its blocks, when the store has nothing left to
        write, or when no block of the document was stored for `stalled_s` seconds: a busy instance always has blocks of
        other requests to write."""
        body = {"prompt": self._tokens, "max_tokens": 1, **self._salted()}
        answer = self._instance.ask("POST", "/v1/completions", body, dict[str, Any], self._timeout_s)
        computing = asyncio.create_task(answer)
        try:
            num_held, since_s = -1, SYSTEM_CLOCK.monotonic()
            while True:
                is_computed = computing.done()
                blocks = await self._fetch_kept()
                if not is_computed or _num_held(blocks) != num_held:
                    num_held, since_s = _num_held(blocks), SYSTEM_CLOCK.monotonic()
                if is_computed and (
                    blocks.is_settled or _is_complete(blocks) or SYSTEM_CLOCK.monotonic() - since_s >= self.stalled_s
                ):
                    computing.result()
                    return blocks
                await asyncio.sleep(self.poll_interval_s)
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    def _salted(self) -> dict[str, Any]:
        return {} if self._salt is None else {"cache_salt": self._salt}

    def _outcome(self, before: KeptBlocks, after: KeptBlocks, pin: bool) -> Outcome:
        num_pinned = max((tier.num_pinned for tier in after.tiers), default=0)
        error = None
        if not after.is_complete:
            error = f"the store keeps {after.num_present} of {after.num_blocks} blocks: {_missing_reason(after)}"
        elif pin and num_pinned < after.num_blocks:
            error = f"the store pinned {num_pinned} of {after.num_blocks} blocks: {_missing_reason(after)}"
        return Outcome(
            document=self._document.name,
            error=error,
            num_tokens=after.num_tokens,
            num_blocks=after.num_blocks,
            num_before=min((tier.num_present for tier in before.tiers), default=0),
            num_kept=after.num_present,
            num_pinned=num_pinned,
            tiers=tuple(after.tiers),
        )


def _worst_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst outcome of one document at several instances: an outcome that failed, or else the one with the most
    blocks."""
    return max(outcomes, key=lambda outcome: (outcome.error is not None, outcome.num_kept))


def _token_ids(prompt: object) -> list[int]:
    try:
        return msgspec.convert(prompt, list[int])
    except msgspec.ValidationError as error:
        raise NotWarmed(f"its tokens cannot be read: {error}") from error


def _is_complete(blocks: KeptBlocks) -> bool:
    """True if at least one tier answers, and every tier that answers has all blocks."""
    return blocks.is_complete and all(tier.num_present == blocks.num_blocks for tier in blocks.tiers if tier.is_healthy)


def _num_held(blocks: KeptBlocks) -> int:
    return sum(tier.num_present for tier in blocks.tiers)


def _missing_reason(blocks: KeptBlocks) -> str:
    ill = [tier.tier for tier in blocks.tiers if not tier.is_healthy]
    if ill:
        return f"tier {', '.join(ill)} does not answer"
    if refusals := [tier.refusal for tier in blocks.tiers if tier.refusal is not None]:
        return "; ".join(refusals)
    return "it is full, or too small for the document; see the instance's log and its store's max_bytes"
