"""The prompts of a request as tokens: whether they fit the model, and their echo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvferry.api.requests import CompletionRequest, GenerationRequest
from kvferry.core.errors import InvalidRequest
from kvferry.core.openai import ContextLengthExceeded
from kvferry.engine.server.assembly import Detokenizer
from kvferry.engine.server.text_codec import THREAD_ABOVE_TOKENS, TextCodec, in_thread_if


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is as the client gave it; None when it came as tokens, or was truncated."""

    token_ids: list[int]
    text: str | None = None


async def completion_prompts(body: CompletionRequest, codec: TextCodec, max_model_len: int) -> list[Prompt]:
    """The prompts of a completion request, in order. Raises `InvalidRequest`."""
    add_special_tokens = body.add_special_tokens is not False
    prompts = []
    for prompt in split_prompts(body.prompt):
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                require_can_fit(prompt, codec, max_model_len, "prompt")
            prompts.append(Prompt(await codec.encode(prompt, add_special_tokens=add_special_tokens), prompt))
        else:
            prompts.append(Prompt(prompt))
    return prompts


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One prompt or several: a string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if len(kinds) > 1:
        raise InvalidRequest("prompt must not mix strings, token ids and lists of token ids", param="prompt")
    # It may have millions of entries: no copy is made to tell the type checker what is known now.
    return [cast(list[int], prompt)] if kinds == {int} else cast(list[str | list[int]], prompt)


def require_can_fit(text: str, codec: TextCodec, max_model_len: int, field: str) -> None:
    """Raise `ContextLengthExceeded` on a text that is too long even if all its tokens were the longest there are.

    To find that out by encoding would take a core for a minute where the text is tens of megabytes.
    """
    longest = max_model_len * codec.longest_token
    if len(text) > longest:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, your {field} has {len(text)}"
            f" characters, more than the {longest} that so many tokens can stand for. Please reduce its length.",
            param=field,
        )


def require_known_tokens(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise `InvalidRequest` on a token id that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{field}: token id {wrong} is out of vocabulary; ids are 0 to {vocab_size - 1}", param=field
        )


def truncate(prompt: Prompt, body: GenerationRequest, max_model_len: int, max_tokens: int | None) -> Prompt:
    """Cut the prompt to `truncate_prompt_tokens`, from the left unless told otherwise; -1 is what the model takes."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prompt
    if wanted < -1 or wanted == 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, got {wanted}", param="truncate_prompt_tokens"
        )
    length = max(1, max_model_len - (max_tokens or 1)) if wanted == -1 else wanted
    if len(prompt.token_ids) <= length:
        return prompt
    kept = prompt.token_ids[:length] if body.truncation_side == "right" else prompt.token_ids[-length:]
    return Prompt(kept)


def answer_budget(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, field: str) -> int:
    """How many tokens the answer may have: `max_tokens`, or all that the prompt leaves of the context.

    Raises `InvalidRequest` for an empty prompt and `ContextLengthExceeded` with the numbers in OpenAI's words.
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
    """A prompt's text, and where in it each of its tokens begins, in characters."""

    text: str
    offsets: list[int]


async def echoes_of(prompts: Sequence[Prompt], codec: TextCodec, *, skip_special_tokens: bool) -> list[Echo]:
    """The echoes of a request's prompts."""
    return [
        await in_thread_if(len(prompt.token_ids) > THREAD_ABOVE_TOKENS, _echo, prompt, codec, skip_special_tokens)
        for prompt in prompts
    ]


def _echo(prompt: Prompt, codec: TextCodec, skip_special_tokens: bool) -> Echo:
    detokenizer = Detokenizer(codec.backend, skip_special_tokens=skip_special_tokens)
    pieces, offsets, length = [], [], 0
    for token_id in prompt.token_ids:
        offsets.append(length)
        pieces.append(detokenizer.step(token_id))
        length += len(pieces[-1])
    pieces.append(detokenizer.flush())
    return Echo("".join(pieces) if prompt.text is None else prompt.text, offsets)
