"""What of a stream the client has, where the instance does not tell its tokens: vLLM's.

Another instance is asked the same from the beginning, and what the client has is left out of its answer, once it is
seen to be the same: a greedy or seeded answer repeats itself, as far as the engine's arithmetic does. Where it turns
out otherwise the client is told, and gets no token of another answer.
"""

from __future__ import annotations

import json
from typing import Any

from kvferry.core.errors import ProtocolError
from kvferry.router.instance import Facts
from kvferry.router.progress import ERROR_EVENT, EventPassage

_DATA = b"data: "
_DONE = b"data: [DONE]"
_FINISHED = b'"finish_reason":"'
_MOST_EVENTS = 256
"""More are read, and kept as their text."""

_TEXTS = ("text", "content", "reasoning", "reasoning_content")
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "token_ids")
_ONCE = ("role", "prompt_token_ids", "prompt_logprobs")


class Replay(EventPassage):
    """Of one stream with one choice, which several instances of the kind `kind` may bring in turn."""

    def __init__(self, kind: type[Facts]) -> None:
        super().__init__(kind)
        self._read = _Said()
        self._unread: list[bytes] = []
        self._created: Any = None
        self._again: _Said | None = None

    def restart(self) -> None:
        """The next instance begins anew."""
        super().restart()
        self._read_on()
        self._again = _Said()

    def fields(self) -> dict[str, Any]:
        """Nothing: the request is sent as it came."""
        return {}

    def _event(self, event: bytes) -> bytes:
        if self._closing:
            return self._hold(self._dated(event))
        if not event.startswith(_DATA):
            return event if self._again is None else b""  # a comment, to keep the connection alive
        if event.startswith(ERROR_EVENT):
            return self._refuse(event)
        if event.startswith(_DONE):
            return self._refuse(event) if self.error or not self._is_all_there() else self._hold(event)
        if self._again is not None:
            event = self._only_new(event, self._again)
        if _FINISHED in event:
            return self._hold(event)
        if event:
            self.begun = True
            self._unread.append(event)
            if len(self._unread) > _MOST_EVENTS:
                self._read_on()
        return event

    def _is_all_there(self) -> bool:
        """Whether an answer that ends now has come as far as the first."""
        if self._again is None or self._again.covers(self._read):
            return True
        self.hopeless = True
        return False

    def _read_on(self) -> None:
        for event in self._unread:
            said = _parsed(event)
            self._created = self._created or said.get("created")
            self._read.add(said)
        self._unread.clear()
        self.hopeless = self.hopeless or self._read.unknown

    def _only_new(self, event: bytes, again: _Said) -> bytes:
        """What the client does not have of it. Raises `ProtocolError` when it says something else."""
        said = _parsed(event)
        try:
            is_new = again.leave_out(said, self._read)
        except ValueError as error:
            self.hopeless = True
            raise ProtocolError(f"the same request was answered in another way: {error}") from error
        return self._written(said) if is_new else b""

    def _dated(self, event: bytes) -> bytes:
        """With the same `created` as the first instance's events."""
        if self._again is None or event.startswith(_DONE):
            return event
        return self._written(_parsed(event))

    def _written(self, said: dict[str, Any]) -> bytes:
        if "created" in said and self._created is not None:
            said["created"] = self._created
        return b"data: %b\n\n" % json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


class _Said:
    """The texts of a choice by their names, and how long its lists were."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.lengths: dict[str, int] = {}
        self.unknown = False
        self.begun = False

    def add(self, event: dict[str, Any]) -> None:
        """One event more."""
        for part in _parts(event):
            self.begun = True
            for name, value in part.items():
                if name in _TEXTS and isinstance(value, str):
                    self.texts[name] = self.texts.get(name, "") + value
                elif name in _LISTS and isinstance(value, list):
                    self.lengths[name] = self.lengths.get(name, 0) + len(value)
                elif name == "tool_calls" and value:
                    self.unknown = True

    def covers(self, known: _Said) -> bool:
        """Whether it is as long as `known`."""
        return all(len(text) <= len(self.texts.get(name, "")) for name, text in known.texts.items())

    def leave_out(self, event: dict[str, Any], known: _Said) -> bool:
        """Cut off `event` what is in `known` already, and note all of it here; whether anything is left. Raises
        `ValueError` when it is something else."""
        had = {**self.lengths}, {name: len(text) for name, text in self.texts.items()}
        whole = json.loads(json.dumps(event))
        for part in _parts(event):
            self._cut(part, known, *had)
        self.add(whole)
        finish = any(choice.get("finish_reason") for choice in _choices(event))
        if finish and not self.covers(known):
            raise ValueError("it ended before what the client has")
        return finish or _says_something(event)

    @staticmethod
    def _cut(part: dict[str, Any], known: _Said, lengths: dict[str, int], num_characters: dict[str, int]) -> None:
        for name in list(part):
            value = part[name]
            if name in _TEXTS and isinstance(value, str):
                begin = num_characters.get(name, 0)
                old = known.texts.get(name, "")[begin : begin + len(value)]
                if not value.startswith(old):
                    raise ValueError(f"{value[:40]!r} where {old[:40]!r} was")
                part[name] = value[len(old) :]
            elif name in _LISTS and isinstance(value, list):
                part[name] = value[max(0, known.lengths.get(name, 0) - lengths.get(name, 0)) :]
            elif name in _ONCE and known.begun:
                del part[name]


def _parts(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of an event in which a choice says something."""
    found = []
    for choice in _choices(event):
        found += [choice, *(choice[name] for name in ("delta", "logprobs") if isinstance(choice.get(name), dict))]
    return found


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []


def _says_something(event: dict[str, Any]) -> bool:
    if not event.get("choices"):
        return True  # usage
    named = (*_TEXTS, *_LISTS, *_ONCE, "tool_calls")
    return any(part.get(name) for part in _parts(event) for name in named)


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        said = json.loads(event.removeprefix(_DATA))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an event of a stream is not JSON: {error}") from error
    return said if isinstance(said, dict) else {}
