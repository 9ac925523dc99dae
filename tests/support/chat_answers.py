"""Random chat answers: each as one whole answer, and as a stream that is divided in any way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

TEXTS = ["", "a", "The ferry", " leaves.", "\n\n", "data: [DONE]", "Zürich 🎉", '{"x": 1}', "\u2028"]


@dataclass(frozen=True)
class ChatAnswer:
    """An answer. `thought` names the field of the reasoning, which engines call differently."""

    thought: str
    thoughts: str
    text: str
    calls: list[tuple[str, str]]
    finish_reason: str
    stop_reason: str | None
    num_cached: int | None

    def usage(self) -> dict[str, Any]:
        details = {} if self.num_cached is None else {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
        return {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, **details}

    def whole(self) -> bytes:
        calls = [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(self.calls)
        ]
        message = {"role": "assistant", "content": self.text or None, "tool_calls": calls, self.thought: self.thoughts}
        return json.dumps({**self._head("chat.completion"), "choices": [self._end(message=message)]}).encode()

    def stream(self, random: Random) -> bytes:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{self.thought: chunk} for chunk in chunks_of(self.thoughts, random)]
        deltas += [{"content": chunk} for chunk in chunks_of(self.text, random)]
        for number, (name, arguments) in enumerate(self.calls):
            first, *more = chunks_of(arguments, random) or [""]
            function = {"name": name, "arguments": first}
            deltas.append({"tool_calls": [{"index": number, "id": f"call_{number}", "function": function}]})
            deltas += [{"tool_calls": [{"index": number, "function": {"arguments": chunk}}]} for chunk in more]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if random.random() < 0.5 and len(choices) > 1:
            choices[-1] |= self._end()  # SGLang sends the reason with the last chunk
        else:
            choices.append(self._end(delta={}))
        chunks: list[dict[str, Any]] = [{**self._head("chat.completion.chunk"), "choices": [one]} for one in choices]
        for chunk in chunks:
            chunk.pop("usage")
        chunks.append({**self._head("chat.completion.chunk"), "choices": []})
        return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks) + b"data: [DONE]\n\n"

    def _end(self, **message: Any) -> dict[str, Any]:
        return {"index": 0, "finish_reason": self.finish_reason, "stop_reason": self.stop_reason, **message}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", "usage": self.usage()}


def draw(random: Random) -> ChatAnswer:
    names = random.choices(["look", "add"], k=random.choice([0, 0, 1, 3]))
    calls = [(name, json.dumps({"x": random.choice(TEXTS)})) for name in names]
    return ChatAnswer(
        thought=random.choice(["reasoning", "reasoning_content"]),
        thoughts="".join(random.choices(TEXTS, k=random.choice([0, 3]))),
        text="".join(random.choices(TEXTS, k=random.choice([0, 1, 5]))),
        calls=calls,
        finish_reason="tool_calls" if calls else random.choice(["stop", "length"]),
        stop_reason=random.choice([None, "end"]),
        num_cached=random.choice([None, 0, 4]),
    )


def chunks_of(text: str, random: Random) -> list[str]:
    """The text, divided at random places."""
    cuts = sorted(random.sample(range(1, len(text)), min(len(text) - 1, random.randrange(6)))) if len(text) > 1 else []
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)] if text else []


def divided(data: bytes, random: Random) -> list[bytes]:
    """The bytes, divided at random places."""
    cuts = sorted(random.sample(range(1, len(data)), min(len(data) - 1, random.randrange(40))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
