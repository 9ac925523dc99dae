"""The bounds of a scheduler. By them, requests that can never run are refused, and answers end."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import InvalidRequest
from kvferry.core.request import FinishReason, Request
from kvferry.engine.scheduling.sequence import Sequence
from kvferry.engine.scheduling.speculation import SpeculativeConfig


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a scheduler, in tokens and sequences. `itl_target_s`: as in `EngineConfig`. `trained_context`: a
    sequence that grows beyond it is computed again, since the model then computes all of its KV differently; None:
    there is no such length."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    itl_target_s: float | None = None
    vocab_size: int = 2**31
    eos_token_ids: frozenset[int] = frozenset()
    fail_on_load_failure: bool = False
    trained_context: int | None = None
    speculation: SpeculativeConfig | None = None

    def require_runnable(self, request: Request, capacity: int) -> None:
        """Raise `InvalidRequest` if a request can never run, however long it waits. `capacity`: capacity of the KV
        cache, in tokens."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if num_prompt >= self.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {num_prompt}"
                " and leaves no room for an answer",
                param="prompt",
            )
        num_answer = len(request.answer_token_ids)
        if num_answer and (num_answer >= request.sampling.max_tokens or num_prompt + num_answer >= self.max_model_len):
            raise InvalidRequest(f"the answer is complete with the {num_answer} tokens that it has", param="max_tokens")
        longest = min(num_prompt + request.sampling.max_tokens, self.max_model_len)
        if longest > capacity:
            raise InvalidRequest(
                f"prompt and answer may reach {longest} tokens, the KV cache holds {capacity};"
                " request fewer tokens, or serve with a larger --kv-cache-memory",
                param="max_tokens",
            )

    def end_of(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        """The finish reason of an answer that ends with its last token `token_id`, or None; and the stop token if the
        client named it."""
        sampling, num_output = sequence.request.sampling, sequence.num_output_tokens
        if num_output >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return "stop", token_id
            if token_id in self.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
        if num_output >= sampling.max_tokens or len(sequence.tokens) >= self.max_model_len or sequence.produces:
            return "length", None
        return None, None
