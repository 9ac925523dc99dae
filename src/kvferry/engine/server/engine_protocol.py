"""The engine as the server sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from kvferry.core.kept import KeptBlocks
from kvferry.core.request import EngineOutput, Request
from kvferry.engine.statistics import EngineSnapshot


class EngineFront(Protocol):
    """What the server asks of an engine. All of it is called from the server's event loop, and none of it blocks."""

    @property
    def model_names(self) -> Sequence[str]:
        """Names the model is served under; the first is the one in answers."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def tokenizer(self) -> Any:
        """A `transformers` fast tokenizer: `backend_tokenizer` and, where the model chats, a chat template."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer by themselves."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The model's `generation_config`: what holds where a request is silent."""

    @property
    def healthy(self) -> bool:
        """Whether requests can be served now."""

    def describe(self) -> dict[str, Any]:
        """What a router should know of this instance; JSON-able."""

    def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        """The answer as it comes. Raises `RequestError`s. It is an asynchronous generator: closing it ends the
        request and frees all it held."""

    async def release(self, transfer_id: str) -> bool:
        """Nobody will fetch this hand-off: end its lease. True when there was one."""

    def prefill_refused(self, transfer_id: str) -> None:
        """A prefill for another instance was refused before `generate`: who waits for its KV is told."""

    async def kept(self, request: Request, *, pin: bool | None) -> KeptBlocks:
        """What the connector's store has of a prompt; with `pin`, that is pinned there, or unpinned if it is
        False. Raises `InvalidRequest`, also where there is no store."""

    async def statistics(self) -> EngineSnapshot:
        """Gauges now, counters since the start. Raises `Unavailable` when the engine is gone, as the others do."""

    async def check(self) -> None:
        """Raise `LeakError` when no request is left, yet something is still kept."""
