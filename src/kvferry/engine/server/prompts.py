"""The prompts of a request as tokens, with checks that they fit the model, and their echo."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvferry.api.requests import CompletionRequest, GenerationRequest
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.openai import ContextLengthExceeded
from kvferry.core.request import are_tokens
from kvferry.engine.server.assembly import Detokenizer
from kvferry.engine.server.text_codec import THREAD_ABOVE_TOKENS, TextCodec

_CHUNK_CHARACTERS = 2**20
"""The tokens of longer texts are counted in chunks of this length before the text is encoded, because the
tokenizer's record of a token takes about 100 bytes."""

_MAX_TRUNCATED_CHARACTERS = 2**20
"""Longest text that is encoded in order to be truncated."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text`: as the client sent it; None if it was sent as tokens, or was truncated."""

    token_ids: list[int]
    text: str | None = None


async def completion_prompts(
    body: CompletionRequest, prompts: Sequence[str | list[int]], codec: TextCodec, max_model_len: int
) -> list[Prompt]:
    """Encode the prompts of a completion request; `prompts`: from `split_prompts`. Raises `InvalidRequest`."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [Prompt(cast(list[int], prompt)) for prompt in prompts]
    for text in texts:
        await require_encodable(text, codec, max_model_len, "prompt", truncated=body.truncate_prompt_tokens is not None)
    encoded = await codec.encode_all(texts, add_special_tokens=body.add_special_tokens is not False)
    return [Prompt(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The request's prompts: a string, several strings, token ids, or several lists of token ids. Raises
    `InvalidRequest`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if type(prompt[0]) is int and _are_integers(prompt):
        # It may have millions of entries, so it is cast instead of copied for the type checker.
        return [cast(list[int], prompt)]
    if len(set(map(type, prompt))) > 1:
        raise InvalidRequest("prompt must not mix strings, token ids and lists of token ids", param="prompt")
    return cast(list[str | list[int]], prompt)


def _are_integers(values: Sequence[object]) -> bool:
    try:
        array("Q", cast(Sequence[int], values))  # takes a tenth of the time of looking at each type
    except TypeError:
        return False
    except OverflowError:
        return set(map(type, values)) == {int}
    return True


async def require_encodable(
    text: str, codec: TextCodec, max_model_len: int, field: str, *, truncated: bool = False
) -> None:
    """Raise `InvalidRequest` for a text that is too long for the model, before it is encoded.

    Encoding tens of megabytes would take one core a minute, and gigabytes of memory. `truncated`: the prompt is
    truncated after encoding, so only the text's length counts.
    """
    if truncated:
        if len(text) > _MAX_TRUNCATED_CHARACTERS:
            raise InvalidRequest(
                f"{field} has {len(text)} characters; at most {_MAX_TRUNCATED_CHARACTERS} are accepted with"
                " truncate_prompt_tokens",
                param=field,
            )
        return
    longest = max_model_len * codec.longest_token_chars
    if len(text) > longest:
        raise _too_long(text, max_model_len, field, f"more than the {longest} that this many tokens can stand for")
    if len(text) > _CHUNK_CHARACTERS:
        await codec.thread_offload.run_if(True, _require_few_tokens, text, codec, max_model_len, field)


def _require_few_tokens(text: str, codec: TextCodec, max_model_len: int, field: str) -> None:
    """Raise if there are too many tokens. Tokens across boundaries count twice; the factor 2 allows for that."""
    num_tokens = 0
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        num_tokens += codec.num_tokens(text[start : start + _CHUNK_CHARACTERS])
        if num_tokens > 2 * max_model_len:
            raise _too_long(text, max_model_len, field, f"which are more than {num_tokens} tokens")


def _too_long(text: str, max_model_len: int, field: str, reason: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens. However, your {field} has {len(text)}"
        f" characters, {reason}. Please reduce its length.",
        param=field,
    )


def require_known_tokens(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise `InvalidRequest` for a token id outside the vocabulary."""
    if not are_tokens(token_ids, vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{field}: token id {wrong} is out of vocabulary; ids are 0 to {vocab_size - 1}", param=field
        )


def truncate(prompt: Prompt, body: GenerationRequest, max_model_len: int, max_tokens: int | None) -> Prompt:
    """Truncate the prompt to `truncate_prompt_tokens`, from the left by default; -1: to the model's context. Raises
    `InvalidRequest`."""
    num_tokens = body.truncate_prompt_tokens
    if num_tokens is None:
        return prompt
    if num_tokens < -1 or num_tokens == 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, got {num_tokens}", param="truncate_prompt_tokens"
        )
    length = max(1, max_model_len - (max_tokens or 1)) if num_tokens == -1 else num_tokens
    if len(prompt.token_ids) <= length:
        return prompt
    token_ids = prompt.token_ids[:length] if body.truncation_side == "right" else prompt.token_ids[-length:]
    return Prompt(token_ids)


def answer_budget(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, field: str) -> int:
    """Max number of tokens of the answer: `max_tokens`, or the rest of the context after the prompt.

    Raises `InvalidRequest` for an empty prompt, and `ContextLengthExceeded` with the numbers, in OpenAI's words.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty", param=field)
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"{limit} However, your {field} resulted in {num_prompt_tokens} tokens, which leaves no room for an"
            f" answer. Please reduce the length of the {field}.",
            param=field,
        )
    if max_tokens is None:
        return max_model_len - num_prompt_tokens
    if num_prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"{limit} However, you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the"
            f" {field}, {max_tokens} in the completion). Please reduce the length of the {field} or completion.",
            param=field,
        )
    return max_tokens


@dataclass(frozen=True)
class Echo:
    """A prompt's text, and the index in it at which each token begins, in characters."""

    text: str
    offsets: list[int]


async def echoes_of(prompts: Sequence[Prompt], codec: TextCodec, *, skip_special_tokens: bool) -> list[Echo]:
    """The echoes of a request's prompts, in order."""
    in_thread = sum(len(prompt.token_ids) for prompt in prompts) > THREAD_ABOVE_TOKENS
    return await codec.thread_offload.run_if(
        in_thread, lambda: [_echo(prompt, codec, skip_special_tokens) for prompt in prompts]
    )


def _echo(prompt: Prompt, codec: TextCodec, skip_special_tokens: bool) -> Echo:
    detokenizer = Detokenizer(codec.backend, skip_special_tokens=skip_special_tokens)
    texts, offsets, length = [], [], 0
    for token_id in prompt.token_ids:
        offsets.append(length)
        texts.append(detokenizer.step(token_id))
        length += len(texts[-1])
    texts.append(detokenizer.flush())
    return Echo("".join(texts) if prompt.text is None else prompt.text, offsets)
