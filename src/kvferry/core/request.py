"""A request to the engine, and what the engine returns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from kvferry.core.messages.hand_off import HandOff, TokenLogprobs
from kvferry.core.messages.kv_keys import KVTransferParams
from kvferry.core.messages.timeline import Timeline
from kvferry.core.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


def are_tokens(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all of them are below `vocab_size`, and none is negative."""
    try:
        found = np.frombuffer(array("Q", token_ids), dtype=np.uint64)
    except OverflowError:  # negative, or no number of 64 bits
        return False
    return not len(found) or int(found.max()) < vocab_size


class Request(msgspec.Struct, kw_only=True):
    """One sequence to generate. `answer_token_ids`: of an answer that another instance has begun; they count as
    generated here. `priority`: lower runs first. `deadline`: on the engine's monotonic clock, in seconds."""

    request_id: str
    prompt_token_ids: list[int]
    answer_token_ids: list[int] = []
    sampling: SamplingParams
    hand_off: HandOff = None
    transfer_params: KVTransferParams | None = None
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    timeline: Timeline = msgspec.field(default_factory=Timeline)


class EngineOutput(msgspec.Struct, kw_only=True):
    """What one step has done for one request. `token_ids` are new; `finish_reason` is set in the last output only.

    `stop_reason`: the stop token id or string that ended the answer; `kv_transfer_params`: the ticket of a request that
    was prefilled for another instance; `error`: set if `finish_reason` is "error".
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    timeline: Timeline | None = None
