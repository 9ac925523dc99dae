"""litellm, unmodified, against an endpoint: `python litellm_suite.py URL`, in an environment that has litellm.

Prints one JSON object: what was asked of it, in the form that the test compares. Fails on the first error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "seed": 5, "num_retries": 0, "timeout": 60}
NUM_AT_ONCE = 16


def ways(url: str) -> dict[str, Any]:
    """Where litellm finds the model: the chat API, and completions."""
    return {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none"}


def usage(answer: Any) -> list[int]:
    return [answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens]


def chat(url: str, **more: Any) -> Any:
    return litellm.completion(messages=MESSAGES, **ways(url), **GREEDY, **more)


def completion(url: str, **more: Any) -> Any:
    return litellm.text_completion(
        prompt="The quick brown fox", **{**ways(url), "model": "text-completion-openai/m"}, **GREEDY, **more
    )


def streamed(chunks: Any, text_of: Any) -> dict[str, Any]:
    """A stream's text and usage."""
    text, used = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += text_of(choice) or ""
        used = usage(chunk) if getattr(chunk, "usage", None) else used
    return {"text": text, "usage": used}


async def many(url: str) -> list[str]:
    """Several at once, by the asynchronous interface."""
    asked = [litellm.acompletion(messages=MESSAGES, **ways(url), **GREEDY) for _ in range(NUM_AT_ONCE)]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]


def refused(url: str) -> dict[str, str]:
    """The errors that litellm makes of ours."""
    found = {}
    for name, more in {"value": {"temperature": -3}, "model": {"model": "openai/other"}}.items():
        try:
            litellm.completion(**{**ways(url), "messages": MESSAGES, **GREEDY, **more})
        except Exception as error:  # noqa: BLE001 - whatever litellm raises is what is compared
            found[name] = type(error).__name__
    return found


def main(url: str) -> None:
    """Ask for all of it."""
    litellm.telemetry = False
    whole, text = chat(url), completion(url)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    print(
        json.dumps(
            {
                "chat": {"text": whole.choices[0].message.content, "usage": usage(whole)},
                "chat_stream": streamed(chat(url, **stream), lambda choice: choice.delta.content),
                "completion": {"text": text.choices[0].text, "usage": usage(text)},
                "completion_stream": streamed(completion(url, **stream), lambda choice: choice.text),
                "logprobs": len(chat(url, logprobs=True, top_logprobs=2).choices[0].logprobs.content),
                "choices": len(chat(url, n=3).choices),
                "stopped": chat(url, stop=[whole.choices[0].message.content[2:4]]).choices[0].finish_reason,
                "many": asyncio.run(many(url)),
                "refused": refused(url),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
