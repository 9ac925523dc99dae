"""Random JSON values of the request types of client libraries: `TypedDict`s, unions, lists and literals."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, Literal, Union

import typing_extensions

OPTIONAL_SHARES = (0.0, 0.03, 0.2)
"""Probabilities of fields that a request may leave out; each object has one of them."""
_SCALARS: dict[Any, tuple[Any, ...]] = {
    str: ("", "a", "x" * 70, "Zürich 🛳", "1", '{"a": 1}', "data:image/png;base64,AA=="),
    int: (1, 2, 64, 64, 1000, 0, -1, 10**12),
    float: (0.0, 0.5, 1.0, 1.5, -1.0),
    bool: (True, False),
    type(None): (None,),
}
_JSON = (None, True, 3, "a", [], {}, {"a": [1, {"b": None}]}, {"type": "object", "properties": {}})


class Undrawable(Exception):
    """A type that has no JSON values, such as an open file."""


def draw_value(kind: Any, draw: Random, depth: int = 0) -> Any:
    """A value of a type. Raises `Undrawable`."""
    origin, arguments = typing_extensions.get_origin(kind), typing_extensions.get_args(kind)
    if kind in _SCALARS:
        return draw.choice(_SCALARS[kind])
    if kind in (object, Any):
        return draw.choice(_JSON)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return draw_value(arguments[0], draw, depth)
    if origin is Literal:
        return draw.choice(arguments)
    if origin is Union or str(type(kind)) == "<class 'types.UnionType'>":
        for choice in draw.sample(arguments, len(arguments)):
            try:
                return draw_value(choice, draw, depth)
            except Undrawable:
                continue
        raise Undrawable(str(kind))
    if typing_extensions.is_typeddict(kind):
        return _draw_object(kind, draw, depth)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: draw_value(arguments[1], draw, depth + 1) for name in draw.sample(("a", "b"), draw.randrange(3))}
    if arguments and isinstance(origin, type) and (issubclass(origin, Iterable) or origin is Sequence):
        return [draw_value(arguments[0], draw, depth + 1) for _ in range(draw.choice((1, 1, 2, 3)) if depth < 6 else 0)]
    if arguments and getattr(origin, "__name__", "") == "SequenceNotStr":
        return [draw_value(arguments[0], draw, depth + 1) for _ in range(draw.randrange(3))]
    raise Undrawable(str(kind))


def _draw_object(kind: Any, draw: Random, depth: int) -> dict[str, Any]:
    values, share = {}, draw.choice(OPTIONAL_SHARES)
    for name, field in typing_extensions.get_type_hints(kind, include_extras=True).items():
        # Not __required_keys__, which does not see the annotations of modules that postpone them.
        is_required = typing_extensions.get_origin(field) is typing.Required
        if is_required or draw.random() < share:
            try:
                values[name] = draw_value(field, draw, depth + 1)
            except Undrawable:
                if is_required:
                    raise
    return values


def mutate(value: Any, draw: Random) -> Any:
    """The value with another JSON value, or without a field, at one place in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {key: entry for key, entry in value.items() if key != name}
        return value | {name: mutate(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        index = draw.randrange(len(value))
        return [*value[:index], mutate(value[index], draw), *value[index + 1 :]]
    return draw.choice(_JSON)
