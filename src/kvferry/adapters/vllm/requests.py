"""The connectors' view of vLLM's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry.adapters.vllm.identity.salts import Salts
from kvferry.connectors.api import Hit
from kvferry.core.blocks.block_hash import BlockHash, extend_hashes, root_hash
from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.messages.hand_off import Consume, HandOff, PrefillResult, Produce, parse_hand_off
from kvferry.core.messages.kv_keys import KVTransferParams, parse_transfer_params
from kvferry.core.messages.timeline import Timeline

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class RequestAdapter:
    """A `RequestView` of vLLM's `Request`."""

    def __init__(self, request: Any, block_size: int, model_identity: str, salts: Salts, *, hand_off: bool) -> None:
        self.request = request
        self.request_id: str = request.request_id
        self.salt_error: InvalidRequest | None = None
        """The reason why the KV has no salt, and is therefore neither reused nor handed off; None if it has one."""
        self.salt = ""
        match salts.of(request):
            case str() as salt:
                self.salt = salt
            case error:
                self.salt_error = error
        self._is_named = self.salt_error is None
        self.error: KvferryError | None = None
        """The reason why the requested hand-off is not possible; None if it is."""
        self.hand_off: HandOff = self._parse(request.kv_transfer_params) if hand_off else None
        self.transfer_params = self._parse_keys(request)
        self.last_match: tuple[int, Hit] | None = None
        """The last result of `match`: the number of computed tokens at that time, and the hit."""
        self.refused = self.failed = self.is_logged = False
        """In this order: True if the last result was a load that must fail; if a load has failed; if its error was
        logged."""
        self._block_size, self._model = block_size, model_identity
        self._hashes: list[BlockHash] | None = None

    def _parse(self, params: dict[str, Any] | None) -> HandOff:
        try:
            return parse_hand_off(params, self.request_id)
        except InvalidRequest as error:
            self.error = error
            return None

    def _parse_keys(self, request: Any) -> KVTransferParams | None:
        """The request's KV keys. vLLM cannot refuse a request with invalid keys: the keys are ignored, and the error is
        logged."""
        try:
            [params] = parse_transfer_params(
                request.kv_transfer_params, {}, num_prompts=1, tenant=request.cache_salt or ""
            )
        except InvalidRequest as error:
            self.error = error
            return None
        return params

    def check_adapter(self, salts: Salts) -> None:
        """Set `salt_error` if the content of the LoRA adapter may have changed since the request arrived. `salts`: the
        object that computed its salt."""
        if self.salt_error is None and self.request.lora_request is not None:
            self.salt_error = salts.uncertainty(self.request.lora_request)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt's tokens; empty if they do not identify the KV."""
        return self.request.prompt_token_ids or () if self._is_named else ()

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """kvferry's own block hashes: vLLM's do not include the model, and with some hash functions they differ between
        processes."""
        if self._hashes is None:
            self._hashes = []
            root = root_hash(self._model, self.salt)
            extend_hashes(self._hashes, root, self.prompt_token_ids, self._block_size)
        return self._hashes

    @property
    def prefill_result(self) -> PrefillResult | None:
        """The producer's result, after a successful end. None on a consumer, because in vLLM the consumer samples the
        first token itself."""
        request = self.request
        if (
            self.salt_error is not None
            or not isinstance(self.hand_off, Produce)
            or request.status not in _COMPLETE
            or not request.output_token_ids
        ):
            return None
        return PrefillResult(
            first_token=request.output_token_ids[0],
            seed=request.sampling_params.seed if request.sampling_params is not None else None,
            timeline=Timeline(arrived=request.arrival_time),
        )

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of prompt and answer."""
        return self.request.all_token_ids if self._is_named else ()

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is computed. The KV of the last token, which was only sampled, is not."""
        return min(self.request.num_computed_tokens, self.request.num_tokens - 1)

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the API's answer. None while the request runs, and if its KV must not be kept."""
        reason = self.request.get_finished_reason() if self.salt_error is None else None
        return None if reason is None else str(reason)

    # For the adapter.

    def ends_prefill(self, start: int, num_tokens: int) -> bool:
        """True if a prefill for another instance is complete after this chunk."""
        num_prompt = len(self.prompt_token_ids)
        return isinstance(self.hand_off, Produce) and start < num_prompt <= start + num_tokens

    @property
    def is_promised(self) -> bool:
        """True if the request states that its KV is on another instance."""
        return isinstance(self.hand_off, Consume) or bool(
            (self.request.kv_transfer_params or {}).get("do_remote_prefill")
        )
