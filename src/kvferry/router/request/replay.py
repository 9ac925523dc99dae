"""Continues streams without progress marks: vLLM's, and streams of several choices.

Another instance gets the same request from the beginning. A greedy or seeded answer repeats itself, as far as the
engine's arithmetic does, and the part that the client already has is left out. If the answer differs, the client gets
an error, and no token of the other answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from kvferry.http.relay import Pattern
from kvferry.router.errors import UnreadableStream
from kvferry.router.instances.instance import Facts
from kvferry.router.request.progress import ERROR_EVENT, ResumableStream

_DATA = b"data: "
_DONE = b"data: [DONE]"
_FINISHED = b'"finish_reason":"'
_NO_CHOICES = b'"choices":[]'
"""Part of the event with the usage, which follows the events of all choices."""
_CONTENT_EVENTS = Pattern(_DATA, "all", (_FINISHED, _NO_CHOICES, ERROR_EVENT, _DONE))


_TEXTS = ("text", "content", "reasoning", "reasoning_content", "name", "arguments")
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "token_ids")
_ONCE = ("role", "prompt_token_ids", "prompt_logprobs", "id", "type")
"""Fields that come once, in a choice's or a call's first event. Calls have other ids in each answer of vLLM."""


class Replay(ResumableStream):
    """A stream, of one choice or more, that several instances of the kind `kind` may send in turn."""

    max_events = 256
    """Maximum number of unparsed events."""

    def __init__(self, kind: type[Facts]) -> None:
        super().__init__(kind)
        self._sent = _ChoiceState()
        self._pending: list[bytes] = []
        self._has_finished = False
        """True if a choice has ended."""
        self._created: Any = None
        self._repeated: _ChoiceState | None = None

    def restart(self) -> None:
        """The next instance sends the answer from the beginning."""
        super().restart()
        self._parse_pending()
        self._repeated, self._has_finished = _ChoiceState(), False

    def fields(self) -> dict[str, Any]:
        """No fields: the request is sent again as it came."""
        return {}

    def _event(self, event: bytes) -> bytes:
        if self._closing:
            return self._hold_back(self._with_created(event))
        if not event.startswith(_DATA):
            return event if self._repeated is None else b""  # a comment, to keep the connection alive
        if event.startswith(ERROR_EVENT):
            return self._end_with_error(event)
        if event.startswith(_DONE):
            return self._end_with_error(event) if self.error or not self._is_complete() else self._hold_back(event)
        if self._has_finished and _NO_CHOICES in event:
            return self._hold_back(self._with_created(event))
        self._has_finished = self._has_finished or _FINISHED in event
        if self._repeated is not None:
            event = self._new_part(event, self._repeated)
        if event:
            self.begun = True
            self._pending.append(event)
            self._compact()
        return event

    def _pattern(self) -> Pattern | None:
        return _CONTENT_EVENTS if self._repeated is None else None

    def on_forwarded(self, captured: bytes) -> None:
        """Append captured whole events."""
        self._pending += captured.split(b"\n\n")[:-1]
        self._compact()

    def _compact(self) -> None:
        """Parse pending events. A stream that cannot be parsed cannot be continued, but is forwarded as long as its
        instance sends it."""
        if len(self._pending) > self.max_events:
            with suppress(UnreadableStream):
                self._parse_pending()

    def _is_complete(self) -> bool:
        """True if an answer that ends now is as long as the first one was."""
        if self._repeated is None or self._repeated.covers(self._sent):
            return True
        self.is_unrecoverable = True
        return False

    def _parse_pending(self) -> None:
        unread, self._pending = self._pending, []
        was_hopeless, self.is_unrecoverable = self.is_unrecoverable, True  # until all events are parsed
        for event in unread:
            data = _parse(event)
            self._created = self._created or data.get("created")
            self._sent.add(data)
        self.is_unrecoverable = was_hopeless or self._sent.is_unreadable

    def _new_part(self, event: bytes, repeated: _ChoiceState) -> bytes:
        """The part of an event that the client does not have yet. Raises `UnreadableStream` if the other part differs
        from what the client has."""
        data = _parse(event)
        try:
            is_new = repeated.remove_sent(data, self._sent)
        except ValueError as error:
            self.is_unrecoverable = True
            raise UnreadableStream(f"the same request got a different answer: {error}") from error
        return self._encode(data) if is_new else b""

    def _with_created(self, event: bytes) -> bytes:
        """The event with the `created` of the first instance's events."""
        if self._repeated is None or event.startswith(_DONE):
            return event
        return self._encode(_parse(event))

    def _encode(self, data: dict[str, Any]) -> bytes:
        if "created" in data and self._created is not None:
            data["created"] = self._created
        return b"data: %b\n\n" % json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class _ChoiceState:
    """The texts of choices and the lengths of their lists, by the choice's number and by the field's name, with the
    call's number for fields of a call."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, str], str] = {}
        self.lengths: dict[tuple[int, str], int] = {}
        self.begun: set[tuple[int, str]] = set()
        """Choices, and calls of choices."""
        self.finished: set[int] = set()
        self.is_unreadable = False

    def add(self, event: dict[str, Any]) -> None:
        """Add an event."""
        for number, call, part in _parts(event):
            self.begun.add((number, call))
            if part.get("finish_reason"):
                self.finished.add(number)
            for name, value in part.items():
                key = number, call + name
                if name in _TEXTS and isinstance(value, str):
                    self.texts[key] = self.texts.get(key, "") + value
                elif name in _LISTS and isinstance(value, list):
                    self.lengths[key] = self.lengths.get(key, 0) + len(value)
                elif name == "tool_calls" and value and not _are_calls(value):
                    self.is_unreadable = True

    def covers(self, sent: _ChoiceState, numbers: Collection[int] | None = None) -> bool:
        """True if it has come as far as `sent`, in these choices or in all."""
        texts = ((key, text) for key, text in sent.texts.items() if numbers is None or key[0] in numbers)
        is_long = all(len(text) <= len(self.texts.get(key, "")) for key, text in texts)
        return is_long and (numbers is not None or sent.finished <= self.finished)

    def remove_sent(self, event: dict[str, Any], sent: _ChoiceState) -> bool:
        """Add `event`, and remove from it the part that is in `sent`. Return True if anything is left. Raises
        `ValueError` if that part differs."""
        lengths, num_characters = {**self.lengths}, {key: len(text) for key, text in self.texts.items()}
        finished = {_number(choice) for choice in _choices(event) if choice.get("finish_reason")}
        whole = json.loads(json.dumps(event))
        for number, call, part in _parts(event):
            self._remove_sent_part(number, call, part, sent, lengths, num_characters)
        _remove_empty_calls(event)
        self.add(whole)
        if not self.covers(sent, finished):
            raise ValueError("it is shorter than what the client has")
        if any(_number(choice) in sent.finished for choice in _choices(event)):
            event["choices"] = [choice for choice in _choices(event) if _number(choice) not in sent.finished]
            return bool(event["choices"])
        return bool(finished) or _has_content(event)

    @staticmethod
    def _remove_sent_part(
        number: int,
        call: str,
        part: dict[str, Any],
        sent: _ChoiceState,
        lengths: dict[tuple[int, str], int],
        num_characters: dict[tuple[int, str], int],
    ) -> None:
        for name in list(part):
            value, key = part[name], (number, call + name)
            if name in _TEXTS and isinstance(value, str):
                begin = num_characters.get(key, 0)
                old = sent.texts.get(key, "")[begin : begin + len(value)]
                if not value.startswith(old):
                    raise ValueError(f"{value[:40]!r} where {old[:40]!r} was")
                part[name] = value[len(old) :]
            elif name in _LISTS and isinstance(value, list):
                part[name] = value[max(0, sent.lengths.get(key, 0) - lengths.get(key, 0)) :]
            elif name in _ONCE and (number, call) in sent.begun:
                del part[name]


def _parts(event: dict[str, Any]) -> list[tuple[int, str, dict[str, Any]]]:
    """The objects of an event that contain text of a choice, each with the choice's number and the call's name in keys
    (empty: it is not of a call)."""
    parts_by_choice = []
    for choice in _choices(event):
        parts = [choice, *(choice[name] for name in ("delta", "logprobs") if isinstance(choice.get(name), dict))]
        parts_by_choice += [(_number(choice), "", part) for part in parts]
        for call in _calls(choice):
            name, function = f"tool_calls[{_number(call)}].", call.get("function")
            parts_by_choice += [(_number(choice), name, part) for part in (call, function) if isinstance(part, dict)]
    return parts_by_choice


def _calls(choice: dict[str, Any]) -> list[dict[str, Any]]:
    delta = choice.get("delta")
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    return calls if _are_calls(calls) and isinstance(calls, list) else []


def _are_calls(value: object) -> bool:
    """True for a list of objects."""
    return isinstance(value, list) and all(isinstance(call, dict) for call in value)


def _remove_empty_calls(event: dict[str, Any]) -> None:
    """Remove calls for which the client has everything in the event."""
    for choice in _choices(event):
        if calls := _calls(choice):
            for call in calls:
                if isinstance(function := call.get("function"), dict) and not function.get("name"):
                    function.pop("name", None)
            rest = [call for call in calls if call.get("id") or _has_text(call.get("function"))]
            choice["delta"] |= {"tool_calls": rest}
            if not rest:
                del choice["delta"]["tool_calls"]


def _has_text(function: object) -> bool:
    return isinstance(function, dict) and bool(function.get("name") or function.get("arguments"))


def _number(choice: dict[str, Any]) -> int:
    number = choice.get("index")
    return number if isinstance(number, int) else 0


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _has_content(event: dict[str, Any]) -> bool:
    if not event.get("choices"):
        return True  # usage
    fields = (*_TEXTS, *_LISTS, *_ONCE, "tool_calls")
    return any(part.get(name) for _, _, part in _parts(event) for name in fields)


def _parse(event: bytes) -> dict[str, Any]:
    try:
        data = json.loads(event.removeprefix(_DATA))
    except (ValueError, RecursionError) as error:
        raise UnreadableStream(f"an event of a stream is not JSON: {error}") from error
    return data if isinstance(data, dict) else {}
