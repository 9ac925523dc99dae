"""How much of a stream the client has, if the instance does not mark its tokens: vLLM's, and those of several choices.

Another instance gets the same request from the beginning, and what the client has is left out of its answer once it is
seen to be the same: a greedy or seeded answer repeats itself, as far as the engine's arithmetic does. If it differs,
the client gets an error, and no token of the other answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from kvferry.http.relay import Pattern
from kvferry.router.errors import UnreadableStream
from kvferry.router.instances.instance import Facts
from kvferry.router.request.progress import ERROR_EVENT, EventPassage

_DATA = b"data: "
_DONE = b"data: [DONE]"
_FINISHED = b'"finish_reason":"'
_NO_CHOICES = b'"choices":[]'
"""What the event with the usage contains, after those of all choices."""
_IN_THE_MIDDLE = Pattern(_DATA, "all", (_FINISHED, _NO_CHOICES, ERROR_EVENT, _DONE))

_MAX_EVENTS = 256
"""Most events that are read; further ones are kept as their text."""

_TEXTS = ("text", "content", "reasoning", "reasoning_content")
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "token_ids")
_ONCE = ("role", "prompt_token_ids", "prompt_logprobs")


class Replay(EventPassage):
    """One stream, of one choice or more, which several instances of the kind `kind` may send in turn."""

    def __init__(self, kind: type[Facts]) -> None:
        super().__init__(kind)
        self._read = _Said()
        self._unread: list[bytes] = []
        self._finishes = False
        """Whether a choice has come to its end."""
        self._created: Any = None
        self._again: _Said | None = None

    def restart(self) -> None:
        """The next instance begins from the start."""
        super().restart()
        self._read_on()
        self._again, self._finishes = _Said(), False

    def fields(self) -> dict[str, Any]:
        """No fields: the request is sent again as it came."""
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
        if self._finishes and _NO_CHOICES in event:
            return self._hold(self._dated(event))
        self._finishes = self._finishes or _FINISHED in event
        if self._again is not None:
            event = self._only_new(event, self._again)
        if event:
            self.begun = True
            self._unread.append(event)
            self._compact()
        return event

    def _pattern(self) -> Pattern | None:
        return _IN_THE_MIDDLE if self._again is None else None

    def passed(self, kept: bytes) -> None:
        """Whole events."""
        self._unread += kept.split(b"\n\n")[:-1]
        self._compact()

    def _compact(self) -> None:
        """A stream that cannot be read cannot be continued; as long as its instance goes on, it is forwarded."""
        if len(self._unread) > _MAX_EVENTS:
            with suppress(UnreadableStream):
                self._read_on()

    def _is_all_there(self) -> bool:
        """Whether an answer that ends now is as long as the first one was."""
        if self._again is None or self._again.covers(self._read):
            return True
        self.hopeless = True
        return False

    def _read_on(self) -> None:
        unread, self._unread = self._unread, []
        was_hopeless, self.hopeless = self.hopeless, True  # until all of it is read
        for event in unread:
            said = _parsed(event)
            self._created = self._created or said.get("created")
            self._read.add(said)
        self.hopeless = was_hopeless or self._read.unknown

    def _only_new(self, event: bytes, again: _Said) -> bytes:
        """The part that the client does not have. Raises `UnreadableStream` if the rest differs from what the client
        has."""
        said = _parsed(event)
        try:
            is_new = again.leave_out(said, self._read)
        except ValueError as error:
            self.hopeless = True
            raise UnreadableStream(f"the same request got a different answer: {error}") from error
        return self._written(said) if is_new else b""

    def _dated(self, event: bytes) -> bytes:
        """The event with the `created` of the first instance's events."""
        if self._again is None or event.startswith(_DONE):
            return event
        return self._written(_parsed(event))

    def _written(self, said: dict[str, Any]) -> bytes:
        if "created" in said and self._created is not None:
            said["created"] = self._created
        return b"data: %b\n\n" % json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


class _Said:
    """The texts of choices and the lengths of their lists, by the choice's number and by name."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, str], str] = {}
        self.lengths: dict[tuple[int, str], int] = {}
        self.begun: set[int] = set()
        self.finished: set[int] = set()
        self.unknown = False

    def add(self, event: dict[str, Any]) -> None:
        """Add one event."""
        for number, part in _parts(event):
            self.begun.add(number)
            if part.get("finish_reason"):
                self.finished.add(number)
            for name, value in part.items():
                at = number, name
                if name in _TEXTS and isinstance(value, str):
                    self.texts[at] = self.texts.get(at, "") + value
                elif name in _LISTS and isinstance(value, list):
                    self.lengths[at] = self.lengths.get(at, 0) + len(value)
                elif name == "tool_calls" and value:
                    self.unknown = True

    def covers(self, known: _Said, numbers: Collection[int] | None = None) -> bool:
        """Whether it has come as far as `known`, in these choices or in all."""
        texts = (one for one in known.texts.items() if numbers is None or one[0][0] in numbers)
        is_long = all(len(text) <= len(self.texts.get(at, "")) for at, text in texts)
        return is_long and (numbers is not None or known.finished <= self.finished)

    def leave_out(self, event: dict[str, Any], known: _Said) -> bool:
        """Remove from `event` what `known` already has, and add all of it here; returns whether anything is left.
        Raises `ValueError` if it differs."""
        lengths, num_characters = {**self.lengths}, {at: len(text) for at, text in self.texts.items()}
        finished = {_number(choice) for choice in _choices(event) if choice.get("finish_reason")}
        whole = json.loads(json.dumps(event))
        for number, part in _parts(event):
            self._cut(number, part, known, lengths, num_characters)
        self.add(whole)
        if not self.covers(known, finished):
            raise ValueError("it is shorter than what the client has")
        if any(_number(choice) in known.finished for choice in _choices(event)):
            event["choices"] = [choice for choice in _choices(event) if _number(choice) not in known.finished]
            return bool(event["choices"])
        return bool(finished) or _says_something(event)

    @staticmethod
    def _cut(
        number: int,
        part: dict[str, Any],
        known: _Said,
        lengths: dict[tuple[int, str], int],
        num_characters: dict[tuple[int, str], int],
    ) -> None:
        for name in list(part):
            value, at = part[name], (number, name)
            if name in _TEXTS and isinstance(value, str):
                begin = num_characters.get(at, 0)
                old = known.texts.get(at, "")[begin : begin + len(value)]
                if not value.startswith(old):
                    raise ValueError(f"{value[:40]!r} where {old[:40]!r} was")
                part[name] = value[len(old) :]
            elif name in _LISTS and isinstance(value, list):
                part[name] = value[max(0, known.lengths.get(at, 0) - lengths.get(at, 0)) :]
            elif name in _ONCE and number in known.begun:
                del part[name]


def _parts(event: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The objects of an event that contain text of a choice, each with the choice's number."""
    found = []
    for choice in _choices(event):
        parts = [choice, *(choice[name] for name in ("delta", "logprobs") if isinstance(choice.get(name), dict))]
        found += [(_number(choice), part) for part in parts]
    return found


def _number(choice: dict[str, Any]) -> int:
    number = choice.get("index")
    return number if isinstance(number, int) else 0


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []


def _says_something(event: dict[str, Any]) -> bool:
    if not event.get("choices"):
        return True  # usage
    named = (*_TEXTS, *_LISTS, *_ONCE, "tool_calls")
    return any(part.get(name) for _, part in _parts(event) for name in named)


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        said = json.loads(event.removeprefix(_DATA))
    except (ValueError, RecursionError) as error:
        raise UnreadableStream(f"an event of a stream is not JSON: {error}") from error
    return said if isinstance(said, dict) else {}
