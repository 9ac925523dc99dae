"""One request inside the engine: its tokens, its blocks and how far it has come. No tensors."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum

from kvferry.core.blocks.block_hash import BlockHash, extend_hashes, root_hash
from kvferry.core.messages.hand_off import Consume, HandOff, PrefillResult, Produce, Ticket, TokenLogprobs
from kvferry.core.request import FinishReason, Request


class Status(Enum):
    """Where a sequence stands. Only RUNNING ones are given tokens to compute."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Meeting:
    """KV of tokens `[first, last)` is loaded while those before are computed. `is_loaded`: it has come."""

    first: int
    last: int
    is_loaded: bool = False


class Sequence:
    """A request and its progress. Satisfies `connectors.api.RequestView`.

    `num_computed_tokens` tokens have their KV in `block_ids`. The *known* tokens are the prompt and the answer so
    far; the last known token's KV is computed when it is the input of the next step.
    """

    def __init__(
        self,
        request: Request,
        *,
        order: int,
        block_size: int,
        model_fingerprint: str,
        trained_context: int | None = None,
    ) -> None:
        self.request = request
        self.order = order
        self.tokens: list[int] = [*request.prompt_token_ids, *request.answer_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.status = Status.WAITING
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_published_blocks = 0
        self.num_restarts = 0
        self.seed = request.sampling.seed or 0
        self.is_load_settled = False
        """Nothing (more) will be loaded through the connector: what is missing is computed here."""
        self.load_target = 0
        """While LOADING: how many tokens will have their KV once it has come."""
        self.layerwise_base: int | None = None
        """While a layerwise load is under way: the computed tokens to fall back to if it fails."""
        self.meeting: Meeting | None = None
        """While its end is loaded and its beginning computed."""
        self.prefill_result: PrefillResult | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self._block_size = block_size
        self._model_fingerprint, self._trained_context = model_fingerprint, trained_context
        self._hashes: list[BlockHash] = []
        self._hashed_as_long = False
        self._root = root_hash(model_fingerprint, self.salt)

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> Tokens[int]:
        """The prompt's tokens."""
        return self.request.prompt_token_ids

    @property
    def salt(self) -> str:
        """The request's cache salt."""
        return self.request.cache_salt

    @property
    def hand_off(self) -> HandOff:
        """The request's part in a hand-off."""
        return self.request.hand_off

    @property
    def produces(self) -> bool:
        """Whether it is prefilled here for another instance."""
        return isinstance(self.request.hand_off, Produce)

    @property
    def consumes(self) -> bool:
        """Whether its prompt is prefilled elsewhere."""
        return isinstance(self.request.hand_off, Consume)

    @property
    def block_hashes(self) -> Tokens[BlockHash]:
        """Names of the full blocks of the prompt."""
        return self.hashes()[: self.num_prompt_tokens // self._block_size]

    def hashes(self) -> list[BlockHash]:
        """Names of the full blocks of all known tokens. Beyond the trained context the same tokens have other KV, and
        so other names."""
        if self._hashed_as_long != self.is_long:
            self._hashes, self._hashed_as_long = [], self.is_long
            fingerprint = f"{self._model_fingerprint}/long" if self.is_long else self._model_fingerprint
            self._root = root_hash(fingerprint, self.salt)
        extend_hashes(self._hashes, self._root, self.tokens, self._block_size)
        return self._hashes

    @property
    def is_long(self) -> bool:
        """Whether it is beyond the trained context, where the model computes all of a sequence's KV otherwise."""
        return self.is_long_at(len(self.tokens))

    def is_long_at(self, num_tokens: int) -> bool:
        """The same for a sequence of `num_tokens`."""
        return self._trained_context is not None and num_tokens > self._trained_context

    def can_use_offered(self, num_tokens: int | None = None) -> bool:
        """Whether KV that the other side of a hand-off computed for `num_tokens` (None: for as many as its ticket says)
        is what this sequence needs: both within the trained context, or both beyond."""
        match self.hand_off:
            case Consume(ticket=ticket) | Produce(source=Ticket() as ticket):
                offered = num_tokens or ticket.remote_num_tokens or self.num_prompt_tokens
                return self.is_long_at(offered) == self.is_long
        return True

    @property
    def is_written_to(self) -> bool:
        """Whether a load writes to its blocks while it runs, so that they cannot be given up."""
        return self.meeting is not None and not self.meeting.is_loaded

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens whose KV is yet to be computed; before a meeting, those that are computed until then."""
        last = len(self.tokens) if self.meeting is None else self.meeting.first
        return last - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: who is served first."""
        return (self.request.priority, self.order)

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached KV may stand in for computing; not when every prompt position's logits are wanted."""
        return self.request.sampling.prompt_logprobs is None

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def adopt(self, result: PrefillResult) -> None:
        """Take over what the prefill instance sampled."""
        self.prefill_result = result
        self.seed = self.seed if result.seed is None else result.seed
        self.request.timeline.adopt(result.timeline)
        self.num_cached_tokens = result.num_cached_tokens
