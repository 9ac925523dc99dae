"""`echo`: the prompt as the beginning of its own answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine.server.detokenize import Detokenizer
from kvferry.engine.server.prompts import Prompt
from kvferry.engine.server.text_codec import THREAD_ABOVE_TOKENS, TextCodec, in_thread_if


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
