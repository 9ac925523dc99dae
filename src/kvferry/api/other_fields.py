"""Fields of vLLM, SGLang, OpenAI and llama.cpp that this server does not have: what each of them means for an answer.

A field without effect is ignored, and listed in a response header. A field that requests something is refused by name,
because no client library shows headers. A test compares both tables with the installed schemas of the other servers, so
that a new name is decided on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest

WITHOUT_EFFECT = frozenset(
    [
        # OpenAI
        *("metadata", "moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity"),
        # vLLM. `mm_payload`, `return_mm_kwargs` and `routed_experts_prompt_start` refine what is requested otherwise.
        *("early_stopping", "ec_transfer_params", "length_penalty", "media_io_kwargs"),
        *("guided_decoding_backend", "include_reasoning", "mm_payload", "mm_processor_kwargs", "return_mm_kwargs"),
        *("routed_experts_prompt_start", "session_id"),
        # SGLang
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "data_parallel_rank"),
        *("disagg_prefill_dp_rank", "images_config", "max_dynamic_patch", "min_dynamic_patch", "ngram_corpus_id"),
        *("return_spec_tokens_details", "rid", "routed_dp_rank", "routed_experts_start_len"),
        *("separate_reasoning", "stream_reasoning", "video_config"),
        # llama.cpp
        *("cache_prompt", "dry_allowed_length", "dry_base", "id_slot", "mirostat_eta", "mirostat_tau"),
        *("penalty_last_n", "repeat_last_n", "return_progress", "timings_per_token", "xtc_threshold"),
    ]
)
"""Fields that do not change what the model says, or only together with another field, which is refused."""


class Refusal(msgspec.Struct, frozen=True):
    """`reason`: what the client can do. `harmless`: values that request nothing, beside null. An empty object is not
    one of them by itself: as a JSON schema it requests JSON, as `web_search_options` a search with defaults."""

    reason: str = "not supported by this server"
    harmless: tuple[Any, ...] = ()


_FLAG = Refusal(harmless=(False,))
_LIST = Refusal(harmless=([],))
_CHAT_ONLY = "only /v1/chat/completions has it"
_IN_TEMPLATE = Refusal("send it in chat_template_kwargs, for chat templates that read it")

REFUSED: dict[str, Refusal] = {
    # OpenAI
    "audio": Refusal(),
    "best_of": Refusal("use n", (1,)),
    "function_call": Refusal("use tool_choice instead", ("none", "auto")),
    "functions": Refusal("use tools instead", ([],)),
    "modalities": Refusal("only ['text'] is supported", (["text"], [])),
    "suffix": Refusal(harmless=("",)),
    "thinking_token_budget": Refusal(_CHAT_ONLY),
    "tool_choice": Refusal(_CHAT_ONLY, ("none", "auto")),
    "web_search_options": Refusal(),
    # vLLM, and its earlier releases
    "guided_choice": Refusal("use structured_outputs.choice"),
    "guided_decoding": Refusal("use structured_outputs"),
    "guided_grammar": Refusal("use structured_outputs.grammar"),
    "guided_json": Refusal("use structured_outputs.json"),
    "guided_regex": Refusal("use structured_outputs.regex"),
    "guided_whitespace_pattern": Refusal("use structured_outputs.whitespace_pattern"),
    "logits_processors": _LIST,
    "prompt_embeds": _LIST,
    "repetition_detection": Refusal(),
    "return_prompt_text": Refusal(_CHAT_ONLY, (False,)),
    "return_token_offsets": _FLAG,
    "use_beam_search": Refusal("beam search is not supported", (False,)),
    "vllm_xargs": Refusal("this server has no logits processors that could read it", ({},)),
    "watermarking": _FLAG,
    # SGLang
    "custom_logit_processor": Refusal(),
    "custom_params": Refusal("this server has no logits processors that could read it", ({},)),
    "ebnf": Refusal("use structured_outputs.grammar"),
    "extra_key": Refusal("use cache_salt"),
    "input_ids": Refusal("send token ids as prompt of /v1/completions"),
    "json_schema": Refusal("use structured_outputs.json"),
    "lora_path": Refusal("this server has no adapters"),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "regex": Refusal("use structured_outputs.regex"),
    "return_cached_tokens_details": Refusal("usage.prompt_tokens_details has the number", (False,)),
    "return_flat_raw_output_top_logprobs": _FLAG,
    "return_flat_raw_top_logprobs_b64": _FLAG,
    "return_hidden_states": _FLAG,
    "return_input_ids_in_sglext": Refusal("use return_token_ids", (False,)),
    "return_meta_info": Refusal("use return_timeline", (False,)),
    "return_output_ids_in_sglext": Refusal("use return_token_ids", (False,)),
    "return_prompt_token_ids": Refusal("use return_token_ids", (False,)),
    "return_routed_experts": _FLAG,
    "return_sampling_mask": _FLAG,
    "sampling_logprobs_mode": Refusal(),
    "session_params": Refusal("send the whole conversation; its cached prefix is reused", ({},)),
    "stop_regex": Refusal("use stop"),
    "task": Refusal(),
    "use_audio_in_video": _FLAG,
    "watermark": _FLAG,
    # llama.cpp, Ollama, Gemini, and fields of a client's own that were meant for another level
    "dry_multiplier": Refusal(harmless=(0,)),
    "dynatemp_range": Refusal(harmless=(0,)),
    "enable_thinking": _IN_TEMPLATE,
    "extra_body": Refusal("its content belongs at the top level of the request", ({},)),
    "format": Refusal("use response_format", ("",)),
    "grammar": Refusal("use structured_outputs.grammar", ("",)),
    "lora": _LIST,
    "mirostat": Refusal(harmless=(0,)),
    "n_probs": Refusal("use logprobs", (0,)),
    "reasoning": Refusal("use reasoning_effort, for chat templates that read it"),
    "repeat_penalty": Refusal("use repetition_penalty", (1,)),
    "response_schema": Refusal("use response_format"),
    "samplers": Refusal(),
    "tfs_z": Refusal(harmless=(1,)),
    "thinking": _IN_TEMPLATE,
    "thinking_budget": _IN_TEMPLATE,
    "thinking_budget_tokens": Refusal("use thinking_token_budget"),
    "top_a": Refusal(harmless=(0,)),
    "top_n_sigma": Refusal(harmless=(0, -1)),
    "typical_p": Refusal(harmless=(1,)),
    "xtc_probability": Refusal(harmless=(0,)),
}
"""Fields that change the answer; refused unless their value requests nothing."""


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for the first of these fields that requests something. Names outside of `REFUSED` are
    ignored."""
    for name, value in fields.items():
        refusal = REFUSED.get(name)
        if refusal is not None and value is not None and not _is_harmless(value, refusal):
            raise InvalidRequest(f"{name}: {refusal.reason}", param=name)


def _is_harmless(value: Any, refusal: Refusal) -> bool:
    """True if the value requests nothing. False and 0 are equal in Python, but not for clients."""
    return any(value == harmless and _is_bool(value) == _is_bool(harmless) for harmless in refusal.harmless)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)
